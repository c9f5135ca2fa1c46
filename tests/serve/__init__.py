"""Tests of the server as a process that real clients connect to."""

import pytest

for name in ("fastapi", "httptools", "prometheus_client", "uvicorn", "httpx", "openai"):
    pytest.importorskip(name, reason="needs pip install 'simkv[serve,dev]'")

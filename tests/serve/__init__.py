"""Tests of the server in a separate process, with real clients."""

import pytest

for name in ("fastapi", "httptools", "prometheus_client", "uvicorn", "httpx", "openai"):
    pytest.importorskip(name, reason="needs pip install 'simkv[serve,dev]'")

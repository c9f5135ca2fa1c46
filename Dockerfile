# Image of simkv. By default, it serves a simulated engine on port 8000; other commands work too:
#   docker build -t simkv .
#   docker run -p 8000:8000 simkv
#   docker run -v "$PWD:/data" simkv run scenario.yaml
# BASE needs Python 3.11 or later, with the module venv.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
ARG EXTRAS=serve
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY simkv simkv
COPY scenarios scenarios
COPY traces traces
RUN python3 -m venv /opt/simkv \
    && /opt/simkv/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && /opt/simkv/bin/pip uninstall --yes pip

FROM ${BASE}
LABEL org.opencontainers.image.title="simkv" \
      org.opencontainers.image.description="Simulator of LLM-serving schedulers" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/simkv /opt/simkv
# The root file system can be read-only: matplotlib writes its cache to /tmp, results go to /data.
ENV PATH=/opt/simkv/bin:$PATH \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN mkdir /data && chown 10001:10001 /data
WORKDIR /data
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["simkv"]
CMD ["serve", "--host", "0.0.0.0", "--engine", "vllm"]

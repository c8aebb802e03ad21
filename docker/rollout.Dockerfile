# syntax=docker/dockerfile:1.7
# The rollout servers: SGLang and its launcher, from requirements/gpu.lock without Transformer Engine, so that torch and
# NCCL are the trainer's. Built from the checkout:
#   docker build -f docker/rollout.Dockerfile -t a3po-rollout .
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends \
      build-essential ca-certificates ibverbs-providers libibverbs1 libnuma1 librdmacm1 procps python3.12-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/megatron_a3po
COPY requirements/ requirements/
RUN --mount=type=cache,target=/root/.cache/uv \
    awk '/^[a-zA-Z0-9]/ {is_te = /^transformer-engine/} !is_te' requirements/gpu.lock > /tmp/rollout.lock \
    && uv venv --python python3.12 /opt/venv \
    && UV_LINK_MODE=copy uv pip sync --compile-bytecode --python /opt/venv/bin/python --require-hashes /tmp/rollout.lock

COPY setup.py pyproject.toml ./
COPY megatron_a3po/ megatron_a3po/
COPY tools/ tools/
COPY configs/ configs/
RUN uv pip install --python /opt/venv/bin/python --no-deps --no-build-isolation -e .

ARG A3PO_UID=10001
RUN test "$A3PO_UID" -gt 0 && useradd --uid "$A3PO_UID" --non-unique --create-home a3po && install -d -o a3po /workspace
USER $A3PO_UID
WORKDIR /workspace

# The launcher restarts servers that end; the run puts faulty ones in quarantine.
HEALTHCHECK --interval=60s --timeout=20s --start-period=600s --retries=3 \
  CMD nvidia-smi -L > /dev/null && pgrep -f "[m]egatron_a3po.serving.entrypoint" > /dev/null
ENTRYPOINT ["python", "/opt/megatron_a3po/tools/launch_rollout_servers.py"]
CMD ["--help"]

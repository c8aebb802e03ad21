# syntax=docker/dockerfile:1.7
# The trainer: torchrun with Megatron-Core and Transformer Engine, from requirements/gpu.lock. Built from the checkout:
#   docker build -f docker/trainer.Dockerfile -t a3po-trainer .
# With Apex' fused kernels: --build-arg APEX_REVISION=COMMIT. Transformer Engine alone takes tens of minutes.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends \
      build-essential ca-certificates git ibverbs-providers libibverbs1 libnuma1 librdmacm1 procps python3.12-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv

ARG CUDA_ARCHITECTURES=90
ARG MAX_JOBS=16
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /opt/megatron_a3po
# First what the environment is made from, so that it is rebuilt only when that changes.
COPY requirements/ requirements/
COPY tools/setup_environment.sh tools/setup_environment.sh
COPY setup.py pyproject.toml ./
COPY megatron_a3po/__init__.py megatron_a3po/__init__.py
RUN --mount=type=cache,target=/root/.cache/uv \
    UV_LINK_MODE=copy MIN_FREE_GB=0 NVTE_CUDA_ARCHS=$CUDA_ARCHITECTURES MAX_JOBS=$MAX_JOBS \
    bash tools/setup_environment.sh gpu || { cat /opt/venv.log; exit 1; }

ARG APEX_REVISION=
RUN if [ -n "$APEX_REVISION" ]; then \
      git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_REVISION" \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=$MAX_JOBS uv pip install --python /opt/venv/bin/python --no-deps \
           --no-build-isolation /tmp/apex \
      && rm -rf /tmp/apex; \
    fi

COPY megatron_a3po/ megatron_a3po/
COPY tools/ tools/
COPY configs/ configs/

ARG A3PO_UID=10001
RUN test "$A3PO_UID" -gt 0 && useradd --uid "$A3PO_UID" --non-unique --create-home a3po && install -d -o a3po /workspace
USER $A3PO_UID
# Configurations find models/, data/ and runs/ here.
WORKDIR /workspace

# After the loss of a GPU, a process may wait for ever.
HEALTHCHECK --interval=60s --timeout=20s --start-period=120s --retries=3 \
  CMD nvidia-smi -L > /dev/null && pgrep -f "[m]egatron_a3po train" > /dev/null
ENTRYPOINT ["torchrun"]
CMD ["--help"]

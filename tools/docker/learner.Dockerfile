# SPDX-License-Identifier: Apache-2.0
# The learner. Run this in the root of the checkout:
#
#   docker build -f tools/docker/learner.Dockerfile -t torchbeast-learner .
#
# PyTorch comes from the package index. PyPI's PyTorch contains CUDA (some gigabytes); it
# needs no other base image, only NVIDIA's container runtime. For another index, such as
# PyTorch's index of CPU builds: --build-arg TORCH_INDEX=https://...
FROM debian:bookworm-slim
ARG TORCH_INDEX=
ENV PATH=/venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3-venv python3-dev g++ pkg-config libgrpc++-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /torchbeast
COPY requirements.txt ./
RUN python3 -m venv /venv \
    && pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} \
        $(grep -E "^(torch|setuptools|pybind11)==" requirements.txt)
COPY . .
RUN TORCHBEAST_REQUIRE_EXTENSION=1 \
    pip install --no-cache-dir --no-build-isolation -c requirements.txt -e ".[minatar]"
RUN useradd --create-home --uid 1000 torchbeast \
    && mkdir /runs && chown torchbeast /runs
USER torchbeast
ENTRYPOINT ["python", "-m", "polybeast", "--savedir", "/runs"]

# SPDX-License-Identifier: Apache-2.0
# Environment servers, without torch and a compiler. Run this in the root of the checkout:
#
#   docker build -f tools/docker/servers.Dockerfile -t torchbeast-servers .
#
# Other environments need other packages: --build-arg ENV_PACKAGES="gymnasium[mujoco]"
FROM debian:bookworm-slim
ARG ENV_PACKAGES="ale-py minatar"
ENV PATH=/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /torchbeast
COPY requirements.txt ./
RUN python3 -m venv /venv \
    && pip install --no-cache-dir -c requirements.txt grpcio gymnasium numpy $ENV_PACKAGES
COPY polybeast_env.py atari_wrappers.py ./
COPY core core
RUN useradd --create-home --uid 1000 torchbeast
USER torchbeast
ENTRYPOINT ["python", "-m", "polybeast_env"]

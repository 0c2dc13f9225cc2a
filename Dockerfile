# Two images of one program: `docker build --target cpu .` and `docker build --target cuda .` (the default).
# Neither has been built where this file was written, which has no Docker engine.

FROM python:3.11-slim AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/drivetrain
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[mcore,ray]'
WORKDIR /work
ENTRYPOINT ["drivetrain"]

# The compiler of the -devel image is what torch.compile and Triton build kernels with.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends python3.12 python3.12-venv build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/drivetrain
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[mcore,ray]'
WORKDIR /work
ENTRYPOINT ["drivetrain"]

# Machines that train (update, encode) and those that only compute (pair).
# docker build -f images/train.Dockerfile -t REGISTRY/mdiff-train:TAG .
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# Triton compiles its launchers with the system's C compiler. CUDA itself comes with torch's wheels; the node brings the driver.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*

WORKDIR /root
# Model caches stay out of the working directory, which Flyte and Ray ship about.
ENV PYTHONPATH=/root PYTHONUNBUFFERED=1 HF_HOME=/var/cache/huggingface

COPY requirements requirements
RUN pip install --no-cache-dir --require-hashes -r requirements/uv.txt \
    && uv pip install --no-cache --system --require-hashes -r requirements/base.txt \
    && python requirements/verify.py requirements/base.txt

COPY mdiff_core mdiff_core
COPY tasks tasks
COPY workflows workflows
COPY assets assets
RUN python -m mdiff_core.config shapes_flow_grpo > /dev/null && python -c "import flytekit, peft, ray, torch"

# Machines that draw samples: Ray nodes with one engine per GPU set.
# docker build -f images/rollout.Dockerfile -t REGISTRY/mdiff-rollout:TAG .
FROM lmsysorg/sglang:v0.5.17-cu130

WORKDIR /root
# Model caches stay out of the working directory, which Flyte and Ray ship about.
ENV PYTHONPATH=/root PYTHONUNBUFFERED=1 HF_HOME=/var/cache/huggingface

COPY requirements requirements
# On top of the base image's Python, not instead of it: what it has in the pinned version (torch, kernels) stays, the
# rest goes into an environment of its own, so that nothing of the base is uninstalled.
RUN python3 -c "import sys; assert (3, 11) <= sys.version_info < (3, 13), sys.version" \
    && python3 -m venv --system-site-packages /opt/mdiff \
    && /opt/mdiff/bin/pip install --no-cache-dir --require-hashes -r requirements/sglang.txt \
    && /opt/mdiff/bin/python requirements/verify.py requirements/sglang.txt
ENV PATH=/opt/mdiff/bin:$PATH

COPY mdiff_core mdiff_core
COPY tasks tasks
COPY workflows workflows
COPY assets assets
RUN python -m mdiff_core.config shapes_flow_grpo > /dev/null && python -c "import flytekit, peft, rapidocr, ray, sglang, torch"

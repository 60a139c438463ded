# flowrl in an image. For the CPU:
#     docker build -t flowrl .
#     docker run --rm -v "$PWD:/work" flowrl train demo
# With CUDA (the wheels of PyTorch bring its libraries; the host needs NVIDIA's driver and container toolkit):
#     docker build -t flowrl:cuda --build-arg TORCH=cu130 .
#     docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" flowrl:cuda train run.yaml
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
# cpu, or a CUDA of https://download.pytorch.org/whl such as cu126, cu128, cu130
ARG TORCH=cpu
ARG EXTRAS=track,remote,serve,math,video,gguf
COPY constraints.txt /tmp/constraints.txt
# torch first, from its own index: PyPI's build has CUDA in it, whatever TORCH says
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" \
        "$(grep '^torch==' /tmp/constraints.txt)"
COPY --from=wheel /wheels /wheels
RUN wheel="$(ls /wheels/flowrl-*.whl)" \
    && pip install --no-cache-dir -c /tmp/constraints.txt "${wheel}[${EXTRAS}]" \
    && rm -rf /wheels
# runs, a user's files and the hub's cache; the container's user needs no other place
RUN useradd --create-home --uid 1000 flowrl && mkdir -p /work /cache \
    && chown flowrl:flowrl /work /cache
ENV HF_HOME=/cache/huggingface FLOWRL_CACHE=/cache/flowrl PYTHONUNBUFFERED=1
USER flowrl
WORKDIR /work
VOLUME /cache
ENTRYPOINT ["flowrl"]
CMD ["--help"]

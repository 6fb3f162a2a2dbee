# speq on the processor, with its server. From the folder of the sources:
#   docker build -t speq .
#   docker run --rm -v MODELS:/models -v speq:/root/.cache/speq speq generate /models/NAME --prompt "The sea"
# Runs read past the page cache: keep models on a local disk, which overlays of images are not.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}" \
    && pip install --no-cache-dir "setuptools>=77" wheel cmake ninja numpy
COPY . /speq
RUN CMAKE_ARGS=-DSPEQ_CUDA=OFF pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /speq

FROM ${PYTHON}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}" \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[serve]" && rm -r /wheels
ENTRYPOINT ["speq"]
CMD ["--help"]

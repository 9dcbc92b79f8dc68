# One image for the hook sidecar, the webhook and the command line; docs/install.md says how to build it.
#
#   docker build --build-arg BASE_DIGEST=sha256:… -t REGISTRY/pcinuma:0.1.0 .
#
# The base is named by digest, and there is no default: what is built is what somebody looked at.
ARG BASE_DIGEST

FROM debian:bookworm-slim@${BASE_DIGEST} AS build
COPY scripts/image.sh /src/scripts/
RUN ["/src/scripts/image.sh", "packages"]
COPY pyproject.toml README.md LICENSE /src/
COPY requirements /src/requirements
COPY schemas /src/schemas
# what the debug page shows: the documentation of findings, the example
COPY docs/findings.md docs/nccl.md /src/docs/
COPY examples/two-sockets /src/examples/two-sockets
COPY hook /src/hook
RUN ["/src/scripts/image.sh", "tree", "/src", "/tree"]

# nothing but the tree: no shell, no package manager
FROM scratch
COPY --from=build /tree/ /
ENV PATH=/opt/pcinuma/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 107:107
ENTRYPOINT ["/opt/pcinuma/bin/pcinuma"]
CMD ["hook"]

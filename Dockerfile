# The image of everything that `moongate` does: docker build --tag moongate:0.1.0 .
FROM rust:1.95-bookworm AS build
RUN rustup component add llvm-tools
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target scripts/image-rootfs /image

FROM scratch
COPY --from=build /image /
USER 65532:65532
ENTRYPOINT ["/moongate"]

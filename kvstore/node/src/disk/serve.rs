//! The port at which readers ask for objects that are on the disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use mooncake_wire::ErrorCode;
use mooncake_wire::capability::CertificateFingerprint;
use mooncake_wire::capability::grants::{self, IssuedCapability};
use mooncake_wire::disk::{DiskRequest, StageArguments, StagedObjects, encode_released, encode_staged};
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, attach_to_response};
use mooncake_wire::rpc::MasterResult;
use moongate_runtime::net::{TcpListener, TcpStream};
use moongate_runtime::{PeerTls, Supervisor, describe_tls_error};
use moongate_transfer::AllowedPeers;
use moongate_transfer::serve::AddressRange;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;

use super::NodeDisk;
use super::staging::{STAGED_TTL, StagingAllocation};
use crate::capabilities::CapabilityChecker;

/// Connections at once; others wait.
const CONNECTIONS: usize = 512;
/// Requests under way at once; others wait. Each has a ring of the tier's, which has megabytes of buffers and keeps the disk
/// busy alone.
const MAX_CONCURRENT_READS: usize = 4;
/// Bytes of a request.
const MAX_REQUEST: usize = 1 << 20;
/// How long a request may take to arrive, and a reply to be taken.
const STALL: Duration = Duration::from_secs(10);
/// How long a connection may lie idle.
const IDLE: Duration = Duration::from_secs(300);
/// Pause after a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(100);

/// Which readers may read from the disk.
#[derive(Clone)]
pub(crate) struct DiskReadAccess {
    /// From which networks.
    pub(crate) peers: AllowedPeers,
    /// With it, connections are TLS, and readers get capabilities for what was brought into memory.
    pub(crate) authentication: Option<(PeerTls, Arc<CapabilityChecker>)>,
}

/// A reader with a certificate.
struct AuthenticatedReader<'a> {
    certificate: CertificateFingerprint,
    checker: &'a CapabilityChecker,
}

/// Serves `readers` until the supervisor shuts down. `endpoint` is where they read what was brought into memory.
pub(crate) fn listen(
    listener: TcpListener,
    disk: Arc<NodeDisk>,
    endpoint: Arc<str>,
    DiskReadAccess { peers, authentication }: DiskReadAccess,
    supervisor: &Supervisor,
) {
    let (tasks, stop) = (supervisor.clone(), supervisor.token());
    let server = DiskReadServer {
        disk,
        endpoint,
        slots: Arc::new(Semaphore::new(MAX_CONCURRENT_READS)),
        authentication,
    };
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    supervisor.spawn_essential("store-disk-listener", async move {
        let accept = async {
            // Never closed, so there is always a permit to wait for.
            while let Ok(slot) = Arc::clone(&connections).acquire_owned().await {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "cannot take a connection of a reader");
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                };
                if !peers.allow(peer.ip()) {
                    tracing::warn!(%peer, allowed = %peers, "a reader from elsewhere is refused");
                    continue;
                }
                let (server, stop) = (server.clone(), tasks.token());
                tasks.spawn("store-disk-reader", async move {
                    let _slot = slot;
                    if let Some(Err(error)) = stop.run_until_cancelled(server.accept(stream)).await {
                        let error = describe_tls_error(&error);
                        tracing::debug!(%peer, error, "a connection of a reader has ended");
                    }
                });
            }
        };
        stop.run_until_cancelled(accept).await;
    });
}

#[derive(Clone)]
struct DiskReadServer {
    disk: Arc<NodeDisk>,
    endpoint: Arc<str>,
    slots: Arc<Semaphore>,
    authentication: Option<(PeerTls, Arc<CapabilityChecker>)>,
}

impl DiskReadServer {
    async fn accept(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let Some((tls, checker)) = &self.authentication else { return self.serve(stream, None).await };
        let (stream, certificate) = tokio::time::timeout(STALL, tls.accept(stream)).await??;
        self.serve(stream, Some(&AuthenticatedReader { certificate, checker })).await
    }

    async fn serve(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        reader: Option<&AuthenticatedReader<'_>>,
    ) -> io::Result<()> {
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        loop {
            match frame::take::<RequestHeader>(&mut input, MAX_REQUEST).map_err(io::Error::other)? {
                FrameParseResult::Frame(request) => {
                    output.clear();
                    self.respond(request.header, &request.body, reader, &mut output).await?;
                    tokio::time::timeout(STALL, stream.write_all(&output)).await??;
                    tokio::time::timeout(STALL, stream.flush()).await??;
                }
                FrameParseResult::Incomplete(_) => {
                    let limit = if input.is_empty() { IDLE } else { STALL };
                    if tokio::time::timeout(limit, stream.read_buf(&mut input)).await?? == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn respond(
        &self,
        header: RequestHeader,
        body: &[u8],
        reader: Option<&AuthenticatedReader<'_>>,
        out: &mut BytesMut,
    ) -> io::Result<()> {
        let RequestHeader { sequence, function_id } = header;
        let written = match DiskRequest::decode(function_id, body) {
            Ok(DiskRequest::Stage(arguments)) => {
                let sizes = arguments.sizes.clone();
                let reply = self.stage(arguments).await;
                let count =
                    if reply.is_ok() { &self.disk.counts.staged } else { &self.disk.counts.not_staged };
                count.fetch_add(1, Relaxed);
                let reply = reply.map(|(given, base)| StagedObjects {
                    batch_id: given.batch,
                    addresses: given.offsets.iter().map(|offset| base + offset).collect(),
                    endpoint: &*self.endpoint,
                    ttl_ms: STAGED_TTL.as_millis() as u64,
                });
                encode_staged(sequence, &reply, out).and_then(|()| match (reader, &reply) {
                    (Some(reader), Ok(staged)) => {
                        attach_to_response(out, 0, &self.grants(reader, &staged.addresses, &sizes))
                    }
                    _ => Ok(()),
                })
            }
            Ok(DiskRequest::Release(arguments)) => {
                encode_released(sequence, self.disk.staging.release(arguments.batch_id), out)
            }
            Err(fault) => fault.write(sequence, out),
        };
        written.map_err(io::Error::other)
    }

    /// Capabilities to read what was brought into memory.
    fn grants(&self, reader: &AuthenticatedReader<'_>, addresses: &[u64], sizes: &[i64]) -> BytesMut {
        let mut attachment = BytesMut::new();
        for (start, size) in addresses.iter().zip(sizes) {
            let span = AddressRange { start: *start, size: u64::try_from(*size).unwrap_or_default() };
            let capability = reader.checker.grant_staged(span, STAGED_TTL, &reader.certificate);
            let lifetime_ms = STAGED_TTL.as_millis() as u32;
            grants::append(
                &mut attachment,
                &IssuedCapability { endpoint: &self.endpoint, lifetime_ms, capability },
            );
        }
        attachment
    }

    async fn stage(&self, arguments: StageArguments<String>) -> MasterResult<(StagingAllocation, u64)> {
        // Never closed.
        let _slot = self.slots.acquire().await;
        let disk = Arc::clone(&self.disk);
        let staged = tokio::task::spawn_blocking(move || disk.stage(&arguments)).await;
        staged.map_err(|_| ErrorCode::INTERNAL_ERROR)?
    }
}

impl NodeDisk {
    /// Brings objects into the buffer. Returns where, and the buffer's address.
    fn stage(&self, arguments: &StageArguments<String>) -> MasterResult<(StagingAllocation, u64)> {
        let names: Vec<&[u8]> = arguments.names.iter().map(String::as_bytes).collect();
        let sizes = arguments.sizes.iter().map(|size| u64::try_from(*size).ok().filter(|size| *size > 0));
        let sizes = sizes.collect::<Option<Vec<u64>>>().filter(|sizes| sizes.len() == names.len());
        let sizes = sizes.filter(|sizes| !sizes.is_empty()).ok_or(ErrorCode::INVALID_PARAMS)?;
        let given = self.staging.allocate(&sizes, Instant::now()).ok_or(ErrorCode::BUFFER_OVERFLOW)?;
        let region = self.staging.region();
        let mut fits = vec![true; names.len()];
        let outcomes = self.tier.get_many(&names, |object, offset, bytes| {
            let (Some(start), Some(size)) = (given.offsets.get(object), sizes.get(object)) else { return };
            let is_inside = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= *size);
            let is_written = is_inside && region.write_at(start + offset, bytes).is_ok();
            if let Some(fits) = fits.get_mut(object) {
                *fits &= is_written;
            }
        });
        for ((outcome, fits), size) in outcomes.into_iter().zip(fits).zip(&sizes) {
            let problem = match outcome {
                Ok(Some(found)) if found == *size && fits => continue,
                Ok(Some(_)) => ErrorCode::INVALID_PARAMS,
                Ok(None) => ErrorCode::OBJECT_NOT_FOUND,
                Err(_) => ErrorCode::FILE_READ_FAIL,
            };
            self.staging.release(given.batch);
            return Err(problem);
        }
        self.staging.mark_filled(given.batch, Instant::now());
        Ok((given, region.base()))
    }
}

//! The port at which readers request objects that are on disk.

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

/// Maximum number of connections; further ones wait in the accept queue.
const CONNECTIONS: usize = 512;
/// Maximum number of concurrent requests; others wait. Each uses one of the tier's io_uring rings, which has megabytes of buffers
/// and saturates the disk by itself.
const MAX_CONCURRENT_READS: usize = 4;
/// Maximum size of a request in bytes.
const MAX_REQUEST: usize = 1 << 20;
/// Time limit for receiving a request and for sending a reply.
const STALL: Duration = Duration::from_secs(10);
/// How long a connection may be idle before it is closed.
const IDLE: Duration = Duration::from_secs(300);
/// Pause after accepting a connection failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Who may read from the disk, and whether readers authenticate.
#[derive(Clone)]
pub(crate) struct DiskReadAccess {
    /// Networks from which readers may connect.
    pub(crate) peers: AllowedPeers,
    /// If set, connections use TLS, and readers receive capabilities for staged objects.
    pub(crate) authentication: Option<(PeerTls, Arc<CapabilityChecker>)>,
}

/// A reader that presented a client certificate.
struct AuthenticatedReader<'a> {
    certificate: CertificateFingerprint,
    checker: &'a CapabilityChecker,
}

/// Serves readers until the supervisor shuts down. `endpoint` is the node from which they read staged objects.
pub(super) fn listen(
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
            // The semaphore is never closed.
            while let Ok(slot) = Arc::clone(&connections).acquire_owned().await {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a disk reader's connection");
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                };
                if !peers.allow(peer.ip()) {
                    tracing::warn!(%peer, allowed = %peers, "refused a disk reader: its address is not in --allow-peers");
                    continue;
                }
                let (server, stop) = (server.clone(), tasks.token());
                tasks.spawn("store-disk-reader", async move {
                    let _slot = slot;
                    if let Some(Err(error)) = stop.run_until_cancelled(server.accept(stream)).await {
                        let error = describe_tls_error(&error);
                        tracing::debug!(%peer, error, "a disk reader's connection failed");
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
                let reply = reply.map(|(allocation, base)| StagedObjects {
                    batch_id: allocation.batch,
                    addresses: allocation.offsets.iter().map(|offset| base + offset).collect(),
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

    /// Issues capabilities to read the staged objects.
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
        // The semaphore is never closed.
        let _slot = self.slots.acquire().await;
        let disk = Arc::clone(&self.disk);
        let staged = tokio::task::spawn_blocking(move || disk.stage(&arguments)).await;
        staged.map_err(|_| ErrorCode::INTERNAL_ERROR)?
    }
}

impl NodeDisk {
    /// Loads objects into the staging buffer. Returns their offsets, and the buffer's address.
    fn stage(&self, arguments: &StageArguments<String>) -> MasterResult<(StagingAllocation, u64)> {
        let names: Vec<&[u8]> = arguments.names.iter().map(String::as_bytes).collect();
        let sizes = arguments.sizes.iter().map(|size| u64::try_from(*size).ok().filter(|size| *size > 0));
        let sizes = sizes.collect::<Option<Vec<u64>>>().filter(|sizes| sizes.len() == names.len());
        let sizes = sizes.filter(|sizes| !sizes.is_empty()).ok_or(ErrorCode::INVALID_PARAMS)?;
        let allocation = self.staging.allocate(&sizes, Instant::now()).ok_or(ErrorCode::BUFFER_OVERFLOW)?;
        let region = self.staging.region();
        let mut fits = vec![true; names.len()];
        let outcomes = self.tier.get_many(&names, |object, offset, bytes| {
            let (Some(start), Some(size)) = (allocation.offsets.get(object), sizes.get(object)) else {
                return;
            };
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
            self.staging.release(allocation.batch);
            return Err(problem);
        }
        self.staging.mark_filled(allocation.batch, Instant::now());
        Ok((allocation, region.base()))
    }
}

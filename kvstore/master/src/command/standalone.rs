//! Runs a standalone master.

use std::sync::Arc;

use moongate_runtime::Supervisor;

use super::{log_flags, service_options};
use crate::aux_services::{AuxServiceAddresses, AuxServiceError, AuxServices, AuxServicesOptions};
use crate::flags::MasterOptions;
use crate::journal::MemoryJournal;
use crate::persistence::{PersistenceError, StatePersistence};
use crate::rpc::{self, RpcServer, RpcServerError};
use crate::server::{HaState, LeadershipStatus, MasterServer};
use crate::{summary, ticker};

/// A running standalone master.
#[derive(Debug)]
pub struct RunningMaster {
    server: Arc<MasterServer>,
    rpc: RpcServer,
    services: AuxServiceAddresses,
    persistence: Option<StatePersistence>,
}

/// A master could not be started.
#[derive(Debug, thiserror::Error)]
pub enum MasterStartError {
    /// The RPC server could not be started.
    #[error(transparent)]
    Rpc(#[from] RpcServerError),
    /// Another service could not be started.
    #[error(transparent)]
    Service(#[from] AuxServiceError),
    /// The state cannot be persisted.
    #[error(transparent)]
    Persistence(#[from] PersistenceError),
}

/// Starts a standalone master. It stops with the supervisor; call [`RunningMaster::finish`] after that.
///
/// # Errors
/// [`MasterStartError`].
pub async fn start(
    options: MasterOptions,
    supervisor: &Supervisor,
) -> Result<RunningMaster, MasterStartError> {
    let MasterOptions { server, rpc, log_summary, data, ignored_flags, unsupported_flags, .. } = options;
    let quotas = options.quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    let services = service_options(options.metrics, options.metadata, options.events);
    let mut services = AuxServices::new(AuxServicesOptions { quotas, ..services });
    log_flags(&ignored_flags, &unsupported_flags);
    if let Some(tls) = &server.tls {
        tls.reload_on_change(supervisor);
    }
    let threads = server.threads;
    let (server, persistence) = if let Some(data) = data {
        let observe = |journal, aux: &_| services.observe(journal, aux);
        let (server, persistence) = StatePersistence::open(&data, server, supervisor, observe)?;
        (server, Some(persistence))
    } else {
        tracing::info!("state is in memory only; set --data_dir to persist it");
        // A journal without a reader needs no buffer.
        let journal = services.observe(Arc::new(MemoryJournal::new(0)), &Arc::default());
        let server = Arc::new(MasterServer::new(server, journal));
        server.open_rebuild();
        (server, None)
    };
    let rpc = rpc::serve(&server, rpc, threads, supervisor)?;
    let services = services.start(&server, supervisor).await?;
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    ticker::start(&server, supervisor);
    if log_summary {
        summary::start(&server, supervisor);
    }
    tracing::info!(rpc = %rpc.address(), threads, "serving Mooncake clients");
    Ok(RunningMaster { server, rpc, services, persistence })
}

impl RunningMaster {
    pub fn server(&self) -> &Arc<MasterServer> {
        &self.server
    }

    /// Bound address of the RPC port.
    pub fn rpc_address(&self) -> std::net::SocketAddr {
        self.rpc.address()
    }

    /// Bound addresses of the other services.
    pub fn service_addresses(&self) -> AuxServiceAddresses {
        self.services
    }

    /// Accepts no more calls. In-flight calls are completed; the supervisor's shutdown waits for them.
    pub fn stop(&self) {
        let status = LeadershipStatus {
            state: HaState::Stopping,
            ..LeadershipStatus::clone(&self.server.leadership.load())
        };
        self.server.leadership.store(Arc::new(status));
        self.rpc.stop();
    }

    /// Closes the state. Call it after all services have stopped.
    pub fn finish(self) {
        if let Some(persistence) = self.persistence {
            persistence.close();
        }
    }
}

//! Masters and metadata servers of either kind.

use moongate_master::{MetadataLocation, MetadataServiceOptions};
use moongate_master_client::admin::{self, AdminClient};
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster};
use moongate_store_testkit::test_master::{TestHttpMaster, start_http_master, start_http_master_with};

use moongate_master_core::{DiskTierOptions, DynamicReplicationMode, MasterCoreOptions};

#[derive(Clone, Copy, Debug)]
pub(crate) enum MasterImplementation {
    Mooncake,
    Moongate,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum MetadataMode {
    Handshake,
    MetadataServer,
}

/// A master, optionally with a metadata server.
pub(crate) struct StoreMasterFixture {
    pub(crate) rpc: String,
    pub(crate) metadata: String,
    pub(crate) admin: String,
    pub(crate) mooncake_master: Option<RealMaster>,
    _moongate_masters: Vec<TestHttpMaster>,
}

impl StoreMasterFixture {
    pub(crate) async fn start(whose: MasterImplementation, found: MetadataMode) -> Self {
        let (address, place) = ("127.0.0.1:0".parse().unwrap(), MetadataLocation::Memory);
        let face = MetadataServiceOptions { address, location: place, cleanup: false };
        // Mooncake's own metadata server listens on all interfaces, and does not support port 0; Moongate's has the same API.
        let ours = start_http_master(matches!(found, MetadataMode::MetadataServer).then_some(face)).await;
        let metadata = match ours.services.metadata {
            Some(address) => format!("http://{address}/metadata"),
            None => HANDSHAKE.to_owned(),
        };
        match whose {
            MasterImplementation::Moongate => {
                let (rpc, admin) = (ours.rpc.clone(), ours.services.admin.to_string());
                Self { rpc, metadata, admin, mooncake_master: None, _moongate_masters: vec![ours] }
            }
            MasterImplementation::Mooncake => {
                let theirs = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, mooncake_master: Some(theirs), _moongate_masters: vec![ours] }
            }
        }
    }

    /// A master that moves to nodes' disks what has no room, and back what is read. Its leases last half a second.
    pub(crate) async fn with_disks(whose: MasterImplementation) -> Self {
        const FLAGS: &[&str] =
            &["--enable_offload", "--offload_on_evict", "--promotion_on_hit", "--default_kv_lease_ttl=500"];
        let metadata = HANDSHAKE.to_owned();
        match whose {
            MasterImplementation::Moongate => {
                let disks = Some(DiskTierOptions {
                    on_evict: true,
                    promote_on_hit: true,
                    ..DiskTierOptions::default()
                });
                let core = MasterCoreOptions {
                    lease_ttl_ms: 500,
                    ramp_ms: 0,
                    disks,
                    ..MasterCoreOptions::default()
                };
                let ours = start_http_master_with(None, core).await;
                let (rpc, admin) = (ours.rpc.clone(), ours.services.admin.to_string());
                Self { rpc, metadata, admin, mooncake_master: None, _moongate_masters: vec![ours] }
            }
            MasterImplementation::Mooncake => {
                let theirs = RealMaster::start_with(NEWEST_WITHOUT_CUDA, FLAGS).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, mooncake_master: Some(theirs), _moongate_masters: Vec::new() }
            }
        }
    }

    /// A master whose leases last half a second.
    pub(crate) async fn with_short_leases(whose: MasterImplementation) -> Self {
        let metadata = HANDSHAKE.to_owned();
        match whose {
            MasterImplementation::Moongate => {
                let ours = start_http_master_with(
                    None,
                    MasterCoreOptions { lease_ttl_ms: 500, ramp_ms: 0, ..MasterCoreOptions::default() },
                )
                .await;
                let (rpc, admin) = (ours.rpc.clone(), ours.services.admin.to_string());
                Self { rpc, metadata, admin, mooncake_master: None, _moongate_masters: vec![ours] }
            }
            MasterImplementation::Mooncake => {
                let theirs =
                    RealMaster::start_with(NEWEST_WITHOUT_CUDA, &["--default_kv_lease_ttl=500"]).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, mooncake_master: Some(theirs), _moongate_masters: Vec::new() }
            }
        }
    }

    /// A master that has objects copied which are read often.
    pub(crate) async fn with_copies_of_hot_objects(whose: MasterImplementation) -> Self {
        let metadata = HANDSHAKE.to_owned();
        match whose {
            MasterImplementation::Moongate => {
                let dynamic_replication = DynamicReplicationMode::Enforce;
                let core =
                    MasterCoreOptions { dynamic_replication, ramp_ms: 0, ..MasterCoreOptions::default() };
                let ours = start_http_master_with(None, core).await;
                let (rpc, admin) = (ours.rpc.clone(), ours.services.admin.to_string());
                Self { rpc, metadata, admin, mooncake_master: None, _moongate_masters: vec![ours] }
            }
            MasterImplementation::Mooncake => {
                let theirs =
                    RealMaster::start_with(NEWEST_WITHOUT_CUDA, &["--dynamic_replication_mode=enforce"])
                        .await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, mooncake_master: Some(theirs), _moongate_masters: Vec::new() }
            }
        }
    }

    /// The name of the segment that is reached at an endpoint.
    pub(crate) async fn segment_at(&self, endpoint: &str) -> String {
        let admin = AdminClient::new(&self.admin, admin::AdminClientOptions::default()).unwrap();
        let detail = admin.segments_detail().await.unwrap();
        let segment = detail.segments.iter().find(|segment| segment.te_endpoint == endpoint);
        segment.unwrap_or_else(|| panic!("{endpoint} in {detail:?}")).segment_name.clone()
    }

    /// Another master of Mooncake's at the same address.
    pub(crate) async fn restart(&mut self) {
        let mut theirs = self.mooncake_master.take().expect("it is theirs");
        theirs.kill().await;
        self.mooncake_master = Some(theirs.start_again().await);
    }
}

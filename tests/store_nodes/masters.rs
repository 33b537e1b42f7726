//! Masters and metadata servers of either kind.

use moongate_kvstore::admin::{self, Admin};
use moongate_master::{MetadataFace, MetadataPlace};

use moongate_kvcore::{DiskTier, DynamicReplication, Settings};

use crate::caller::{Ours, ours, ours_with};
use crate::world::{HANDSHAKE, NEWEST, RealMaster};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Whose {
    Theirs,
    Ours,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    ByHandshake,
    ByServer,
}

/// A master and, if it is asked for, a metadata server.
pub(crate) struct Store {
    pub(crate) rpc: String,
    pub(crate) metadata: String,
    pub(crate) admin: String,
    pub(crate) theirs: Option<RealMaster>,
    _ours: Vec<Ours>,
}

impl Store {
    pub(crate) async fn start(whose: Whose, found: Found) -> Self {
        let (address, place) = ("127.0.0.1:0".parse().unwrap(), MetadataPlace::Memory);
        let face = MetadataFace { address, place, cleanup: false };
        // Mooncake's own metadata server listens on all interfaces, and has no port 0; ours answers the same.
        let ours = ours(matches!(found, Found::ByServer).then_some(face)).await;
        let metadata = match ours.faces.metadata {
            Some(address) => format!("http://{address}/metadata"),
            None => HANDSHAKE.to_owned(),
        };
        match whose {
            Whose::Ours => {
                let (rpc, admin) = (ours.rpc.clone(), ours.faces.admin.to_string());
                Self { rpc, metadata, admin, theirs: None, _ours: vec![ours] }
            }
            Whose::Theirs => {
                let theirs = RealMaster::start(NEWEST).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, theirs: Some(theirs), _ours: vec![ours] }
            }
        }
    }

    /// A master that moves to nodes' disks what has no room, and back what is read. Its leases last half a second.
    pub(crate) async fn with_disks(whose: Whose) -> Self {
        const FLAGS: &[&str] =
            &["--enable_offload", "--offload_on_evict", "--promotion_on_hit", "--default_kv_lease_ttl=500"];
        let metadata = HANDSHAKE.to_owned();
        match whose {
            Whose::Ours => {
                let disks = Some(DiskTier { on_evict: true, promote_on_hit: true, ..DiskTier::default() });
                let core = Settings { lease_ttl_ms: 500, ramp_ms: 0, disks, ..Settings::default() };
                let ours = ours_with(None, core).await;
                let (rpc, admin) = (ours.rpc.clone(), ours.faces.admin.to_string());
                Self { rpc, metadata, admin, theirs: None, _ours: vec![ours] }
            }
            Whose::Theirs => {
                let theirs = RealMaster::start_with(NEWEST, FLAGS).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, theirs: Some(theirs), _ours: Vec::new() }
            }
        }
    }

    /// A master whose leases last half a second.
    pub(crate) async fn with_short_leases(whose: Whose) -> Self {
        let metadata = HANDSHAKE.to_owned();
        match whose {
            Whose::Ours => {
                let ours =
                    ours_with(None, Settings { lease_ttl_ms: 500, ramp_ms: 0, ..Settings::default() }).await;
                let (rpc, admin) = (ours.rpc.clone(), ours.faces.admin.to_string());
                Self { rpc, metadata, admin, theirs: None, _ours: vec![ours] }
            }
            Whose::Theirs => {
                let theirs = RealMaster::start_with(NEWEST, &["--default_kv_lease_ttl=500"]).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, theirs: Some(theirs), _ours: Vec::new() }
            }
        }
    }

    /// A master that has objects copied which are read often.
    pub(crate) async fn with_copies_of_hot_objects(whose: Whose) -> Self {
        let metadata = HANDSHAKE.to_owned();
        match whose {
            Whose::Ours => {
                let dynamic_replication = DynamicReplication::Enforce;
                let core = Settings { dynamic_replication, ramp_ms: 0, ..Settings::default() };
                let ours = ours_with(None, core).await;
                let (rpc, admin) = (ours.rpc.clone(), ours.faces.admin.to_string());
                Self { rpc, metadata, admin, theirs: None, _ours: vec![ours] }
            }
            Whose::Theirs => {
                let theirs = RealMaster::start_with(NEWEST, &["--dynamic_replication_mode=enforce"]).await;
                let (rpc, admin) = (theirs.rpc.clone(), theirs.admin.clone());
                Self { rpc, metadata, admin, theirs: Some(theirs), _ours: Vec::new() }
            }
        }
    }

    /// The name of the segment that is reached at an endpoint.
    pub(crate) async fn segment_at(&self, endpoint: &str) -> String {
        let admin = Admin::new(&self.admin, admin::Options::default()).unwrap();
        let detail = admin.segments_detail().await.unwrap();
        let segment = detail.segments.iter().find(|segment| segment.te_endpoint == endpoint);
        segment.unwrap_or_else(|| panic!("{endpoint} in {detail:?}")).segment_name.clone()
    }

    /// Another master of Mooncake's at the same address.
    pub(crate) async fn restart(&mut self) {
        let mut theirs = self.theirs.take().expect("it is theirs");
        theirs.kill().await;
        self.theirs = Some(theirs.start_again().await);
    }
}

//! Health of the picker, by gRPC's health checking protocol.

use std::fmt;
use std::pin::Pin;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::SERVICE_NAME;
use futures_util::Stream;
use moongate_gateway::EndpointPicker;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Services of the endpoint picker protocol besides the processor's own name.
const LIVENESS: &str = "liveness";
const READINESS: &str = "readiness";

pub(crate) struct PickerHealth(EndpointPicker);

impl PickerHealth {
    pub(crate) fn server(picker: EndpointPicker) -> HealthServer<Self> {
        HealthServer::new(Self(picker))
    }
}

impl fmt::Debug for PickerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PickerHealth").finish_non_exhaustive()
    }
}

#[tonic::async_trait]
impl Health for PickerHealth {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let is_serving = match request.get_ref().service.as_str() {
            LIVENESS => true,
            "" | READINESS | SERVICE_NAME => self.0.is_ready(),
            _ => return Err(Status::not_found("no such service; there are liveness and readiness")),
        };
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("poll Check instead"))
    }
}

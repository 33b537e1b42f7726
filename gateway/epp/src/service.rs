//! Envoy's external processor as a gRPC service.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::Stream;
use futures_util::stream::unfold;
use moongate_gateway::EndpointPicker;
use tonic::codegen::{Body, BoxFuture, Service, StdError};
use tonic::{Request, Response, Status, Streaming};
use tonic_health::pb::health_server::HealthServer;

use crate::health::PickerHealth;
use crate::session::PickSession;

const HEALTH_PATH: &str = "/grpc.health.v1.Health/";

pub(crate) struct PickerService {
    picker: EndpointPicker,
    fallbacks: usize,
}

/// The gRPC services of the picker.
#[derive(Debug, Clone)]
pub(crate) struct PickerServices {
    processor: ExternalProcessorServer<PickerService>,
    health: HealthServer<PickerHealth>,
}

impl PickerServices {
    pub(crate) fn new(picker: EndpointPicker, fallbacks: usize) -> Self {
        let health = PickerHealth::server(picker.clone());
        Self { processor: ExternalProcessorServer::new(PickerService { picker, fallbacks }), health }
    }
}

impl<B> Service<http::Request<B>> for PickerServices
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Both always are.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        match request.uri().path().starts_with(HEALTH_PATH) {
            true => self.health.call(request),
            // Also responds to unknown services.
            false => self.processor.call(request),
        }
    }
}

impl fmt::Debug for PickerService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PickerService").field("fallbacks", &self.fallbacks).finish_non_exhaustive()
    }
}

#[tonic::async_trait]
impl ExternalProcessor for PickerService {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    /// The session runs while the proxy polls for its answers: without a task of its own, it ends with the stream.
    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let session = PickSession::new(self.picker.clone(), self.fallbacks, request.into_inner());
        let answers = unfold(Some(session), |session| async {
            let mut session = session?;
            let answer = session.next().await?;
            // A session that has failed is over.
            let session = answer.is_ok().then_some(session);
            Some((answer, session))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

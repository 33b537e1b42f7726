//! Envoy's external processor as a gRPC service.

use std::fmt;
use std::pin::Pin;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::Stream;
use futures_util::stream::unfold;
use moongate_gateway::EndpointPicker;
use tonic::{Request, Response, Status, Streaming};

use crate::session::PickSession;

pub(crate) struct PickerService {
    picker: EndpointPicker,
    fallbacks: usize,
}

impl PickerService {
    pub(crate) fn server(picker: EndpointPicker, fallbacks: usize) -> ExternalProcessorServer<Self> {
        ExternalProcessorServer::new(Self { picker, fallbacks })
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

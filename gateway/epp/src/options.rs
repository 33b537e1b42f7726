//! Settings of the endpoint picker.

use clap::Args;
use moongate_gateway::GatewayOptions;

/// The port on which the Gateway API Inference Extension expects a picker.
const DEFAULT_LISTEN: &str = "127.0.0.1:9002";
const LISTEN_HELP: &str = "Address for the proxy's external processing (gRPC). Default: loopback only, so that nothing is exposed to a network by accident";

/// Command-line options of `moongate epp`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("listen", |arg| arg.default_value(DEFAULT_LISTEN).help(LISTEN_HELP)))]
pub struct EppOptions {
    /// Other engines named for each request, best first, which the proxy tries in this order if the picked one fails. Default 2: more would
    /// only be tried when three engines fail at once.
    #[arg(long, value_name = "N", env = "MOONGATE_FALLBACK_ENDPOINTS", default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=16))]
    pub fallback_endpoints: u8,

    /// Settings of the gateway, whose decisions and feedback these are.
    #[command(flatten)]
    pub gateway: GatewayOptions,
}

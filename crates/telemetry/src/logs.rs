//! Logs on standard error. A line that cannot be written is dropped and counted, without other effects.

use std::io::IsTerminal as _;

use clap::{Args, ValueEnum};
use moongate_runtime::StderrLogOutput;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Crates with too many debug lines. A filter that names one of them overrides this.
const NOISY_CRATES_FILTER: &str = "h2=warn,hyper=warn,hyper_util=warn,reqwest=warn,rustls=warn,tower=warn,kube_client=warn,\
                     opentelemetry=warn,opentelemetry_sdk=warn";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// Human-readable text
    #[default]
    Text,
    /// One JSON object per line, for log collectors
    Json,
}

/// Command-line flags of the logs.
#[derive(Debug, Clone, Args)]
pub struct LoggingArgs {
    /// Log format
    #[arg(
        long = "log-format",
        env = "MOONGATE_LOG_FORMAT",
        value_enum,
        default_value = "text",
        help_heading = "Logs"
    )]
    pub format: LogFormat,
    /// Minimum log level, for all or by module: `info` or `warn,moongate_gateway=debug`
    #[arg(
        long = "log-filter",
        env = "MOONGATE_LOG_FILTER",
        value_parser = parse_filter,
        default_value = "info",
        value_name = "FILTER",
        help_heading = "Logs"
    )]
    pub filter: String,
}

impl Default for LoggingArgs {
    fn default() -> Self {
        Self { format: LogFormat::Text, filter: "info".to_owned() }
    }
}

/// Logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The log filter cannot be parsed.
    #[error(
        "`{filter}` is not a log filter: {source}; write a level (error, warn, info, debug, trace) or MODULE=LEVEL, separated by commas"
    )]
    Filter { filter: String, source: ParseError },
    /// Logging was already set up in this process.
    #[error("logging is already set up: {0}; call init_logs once, at the start of main")]
    AlreadySet(#[from] tracing_subscriber::util::TryInitError),
}

/// Sends the logs of the whole process to standard error.
///
/// # Errors
/// When the filter is invalid or logging is already set up.
pub fn init_logs(options: &LoggingArgs) -> Result<(), LoggingError> {
    let coloured =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    subscriber(options, || StderrLogOutput, coloured)?.try_init()?;
    Ok(())
}

fn subscriber<W>(
    options: &LoggingArgs,
    writer: W,
    coloured: bool,
) -> Result<Box<dyn Subscriber + Send + Sync>, LoggingError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = filter(&options.filter)?;
    // Modules are useful only when debugging.
    let with_target = filter.max_level_hint().is_none_or(|level| level > LevelFilter::INFO);
    let lines = tracing_subscriber::fmt().with_writer(writer).with_env_filter(filter);
    Ok(match options.format {
        LogFormat::Text => Box::new(lines.with_ansi(coloured).with_target(with_target).finish()),
        LogFormat::Json => Box::new(lines.json().flatten_event(true).finish()),
    })
}

fn filter(text: &str) -> Result<EnvFilter, LoggingError> {
    let parsed = EnvFilter::try_new(text)
        .and_then(|_| EnvFilter::try_new(format!("{NOISY_CRATES_FILTER},{text}")))
        .map_err(|source| LoggingError::Filter { filter: text.to_owned(), source })?;
    Ok(parsed)
}

fn parse_filter(text: &str) -> Result<String, LoggingError> {
    filter(text).map(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc::{Sender, channel};

    #[derive(Clone)]
    struct ChannelWriter(Sender<Vec<u8>>);

    impl Write for ChannelWriter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(options: &LoggingArgs) -> String {
        let (sender, receiver) = channel();
        let lines = ChannelWriter(sender);
        let subscriber = subscriber(options, move || lines.clone(), false).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("too detailed");
            tracing::debug!(target: "hyper::proto", "noise");
            tracing::info!(port = 8080, "listening");
        });
        String::from_utf8(receiver.iter().flatten().collect()).unwrap()
    }

    #[test]
    fn text_at_info_has_no_module() {
        let text = logged(&LoggingArgs::default());
        assert!(text.ends_with("  INFO listening port=8080\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn text_at_debug_has_the_module_and_no_noise() {
        let text = logged(&LoggingArgs { filter: "debug".into(), ..LoggingArgs::default() });
        assert!(text.contains("DEBUG moongate_telemetry::logs::tests: too detailed"), "{text}");
        assert!(!text.contains("noise"), "{text}");
        let named = logged(&LoggingArgs { filter: "debug,hyper=debug".into(), ..LoggingArgs::default() });
        assert!(named.contains("noise"), "{named}");
    }

    #[test]
    fn json_is_one_object_a_line() {
        let text = logged(&LoggingArgs { format: LogFormat::Json, ..LoggingArgs::default() });
        assert!(text.starts_with('{') && text.ends_with("}\n"), "{text}");
        assert!(text.contains(r#""message":"listening","port":8080"#), "{text}");
    }

    #[test]
    fn an_invalid_filter_is_rejected_with_its_text() {
        let error = parse_filter("moongate=loud").unwrap_err().to_string();
        assert!(error.starts_with("`moongate=loud` is not a log filter: "), "{error}");
    }
}

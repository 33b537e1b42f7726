//! An S3-compatible server on loopback, with its objects in memory.

mod moto;
mod objects;

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::thread::JoinHandle;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{any, get};
use tokio::sync::oneshot;

use self::moto::MotoProcess;

/// The bucket that it has.
const BUCKET: &str = "test";
/// With the value `moto`, the server is moto, an independent implementation in Python, instead of this crate's.
const CHOICE: &str = "MOONGATE_TEST_S3";

/// The server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum S3ServerError {
    #[error("the S3 server for tests: {0}")]
    Io(#[from] io::Error),
    /// Its installation fails, or it ends; the text is its output.
    #[error("the S3 server for tests: {0}")]
    Start(String),
    #[error("{CHOICE} is {0:?}; the only value is \"moto\"")]
    Choice(String),
}

/// A server with one bucket. It ends on drop.
#[derive(Debug)]
pub struct S3Server {
    address: String,
    _runs: Running,
}

#[derive(Debug)]
enum Running {
    Thread(#[expect(dead_code, reason = "ends on drop")] ServerThread),
    Process(#[expect(dead_code, reason = "ends on drop")] MotoProcess),
}

/// A thread of its own, because a test's clock may be paused, or its runtime blocked.
#[derive(Debug)]
struct ServerThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl S3Server {
    /// Starts the server.
    ///
    /// # Errors
    /// [`S3ServerError`]; with moto, for instance without Python.
    pub fn start() -> Result<Self, S3ServerError> {
        match std::env::var(CHOICE) {
            Err(_) => Self::in_thread(),
            Ok(choice) if choice == "moto" => {
                let process = MotoProcess::start()?;
                Ok(Self { address: process.address().to_owned(), _runs: Running::Process(process) })
            }
            Ok(other) => Err(S3ServerError::Choice(other)),
        }
    }

    fn in_thread() -> Result<Self, S3ServerError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?.to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let router = Router::new()
            .route("/{bucket}", get(objects::list))
            .route("/{bucket}/{*key}", any(objects::object))
            .layer(DefaultBodyLimit::disable())
            .with_state(objects::SharedObjects::default());
        let serve = async move {
            tokio::select! {
                served = axum::serve(listener, router) => drop(served),
                // With the runtime, its connections end.
                _ = stopped => {}
            }
        };
        let thread = std::thread::Builder::new()
            .name("s3-server".to_owned())
            .spawn(move || runtime.block_on(serve))?;
        let thread = ServerThread { stop: Some(stop), thread: Some(thread) };
        Ok(Self { address, _runs: Running::Thread(thread) })
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Name of its bucket.
    #[must_use]
    pub fn bucket(&self) -> &'static str {
        BUCKET
    }

    /// Environment variables of its clients. It accepts any credentials.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT_URL", self.url()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
            ("NO_PROXY", "*".to_owned()),
        ]
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of a handler has been printed.
            drop(thread.join());
        }
    }
}

//! moto, a fake of AWS in Python.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use super::{BUCKET, S3ServerError};

const SETUP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/s3/setup");
/// Line that it prints once it listens.
const LISTENING: &str = "Running on http://";

/// The server's process. It ends on drop.
#[derive(Debug)]
pub(super) struct MotoProcess {
    process: Child,
    address: String,
}

impl MotoProcess {
    /// Installs the server if necessary, and starts it.
    pub(super) fn start() -> Result<Self, S3ServerError> {
        let setup = Command::new(SETUP).output()?;
        if !setup.status.success() {
            return Err(S3ServerError::Start(String::from_utf8_lossy(&setup.stderr).into_owned()));
        }
        let program = String::from_utf8_lossy(&setup.stdout).trim().to_owned();
        let mut process = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", "0"])
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = process.stderr.take();
        let mut server = Self { process, address: String::new() };
        let mut lines = BufReader::new(stderr.ok_or_else(|| io::Error::other("no standard error"))?).lines();
        let mut output = String::new();
        for line in lines.by_ref() {
            let line = line?;
            if let Some((_, address)) = line.split_once(LISTENING) {
                server.address = address.trim().to_owned();
                break;
            }
            output += &line;
            output.push('\n');
        }
        if server.address.is_empty() {
            return Err(S3ServerError::Start(output));
        }
        // It logs every request, and would block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        server.create_bucket()?;
        Ok(server)
    }

    fn create_bucket(&self) -> Result<(), S3ServerError> {
        let mut connection = TcpStream::connect(&self.address)?;
        let host = &self.address;
        write!(
            connection,
            "PUT /{BUCKET} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        let mut response = String::new();
        connection.read_to_string(&mut response)?;
        match response.starts_with("HTTP/1.1 200") {
            true => Ok(()),
            false => Err(S3ServerError::Start(response)),
        }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for MotoProcess {
    fn drop(&mut self) {
        // It has nothing to save.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

//! The `moongate` binary as a child process.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::TEST_TIMEOUT;

/// Tests expect predictions also while the machine is busy with others.
const PATIENCE: (&str, &str) = ("MOONGATE_PROMPT_TIMEOUT", "30s");

/// A running `moongate`. Killed when dropped.
pub(crate) struct MoongateProcess {
    child: Child,
    /// Standard output and standard error so far.
    output: [watch::Receiver<String>; 2],
    /// The tasks that read its output.
    _readers: Supervisor,
}

/// A `moongate` that has ended.
#[derive(Debug)]
pub(crate) struct ProcessOutput {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl MoongateProcess {
    /// Starts `moongate` with an environment of its own, so that the machine's settings have no effect.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::spawn(
            Command::new(env!("CARGO_BIN_EXE_moongate")).args(args).env_clear().env(PATIENCE.0, PATIENCE.1),
        )
    }

    /// Starts a command, which may be another program.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let readers = Supervisor::new();
        let stdout = collect_output(&readers, child.stdout.take().unwrap());
        let stderr = collect_output(&readers, child.stderr.take().unwrap());
        Self { child, output: [stdout, stderr], _readers: readers }
    }

    /// Runs a command line to its end.
    pub(crate) async fn run(args: &[&str]) -> ProcessOutput {
        Self::start(args).wait().await
    }

    /// Starts `moongate gateway` on free ports, and waits until it listens.
    pub(crate) async fn gateway(flags: &[String]) -> (Self, GatewayAddresses) {
        Self::gateway_with_environment(flags, &[]).await
    }

    /// The same as [`MoongateProcess::gateway`] with these environment variables, and no others.
    pub(crate) async fn gateway_with_environment(
        flags: &[String],
        environment: &[(&str, String)],
    ) -> (Self, GatewayAddresses) {
        Self::listening(("gateway", "gateway listening"), flags, environment).await
    }

    /// Starts a command with the gateway's listeners on free ports, and waits for the line that says that it listens.
    pub(crate) async fn listening(
        (command, line): (&str, &str),
        flags: &[String],
        environment: &[(&str, String)],
    ) -> (Self, GatewayAddresses) {
        let mut args = vec![command, "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
        args.extend(flags.iter().map(String::as_str));
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        let environment = environment.iter().map(|(name, value)| (name, value));
        let mut binary =
            Self::spawn(command.args(args).env_clear().env(PATIENCE.0, PATIENCE.1).envs(environment));
        let line = binary.wait_for_line(line).await;
        let field = |name: &str| {
            let value = line.split_whitespace().find_map(|word| word.strip_prefix(name));
            value.unwrap_or_else(|| panic!("no {name} in {line:?}")).to_owned()
        };
        let addresses = GatewayAddresses { public: field("address="), admin: field("admin=") };
        (binary, addresses)
    }

    /// Waits for a complete line that contains `needle`, on either output.
    pub(crate) async fn wait_for_line(&mut self, needle: &str) -> String {
        let [stdout, stderr] = &mut self.output;
        let found = tokio::time::timeout(TEST_TIMEOUT, async {
            tokio::select! {
                line = find_line(stdout, needle) => line,
                line = find_line(stderr, needle) => line,
            }
        });
        match found.await {
            Ok(line) => line,
            Err(_) => panic!("no line with {needle:?} came\n{}", self.output_text()),
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("the process still runs")
    }

    pub(crate) fn stdout(&self) -> String {
        self.output[0].borrow().clone()
    }

    /// Both outputs so far, for messages.
    pub(crate) fn output_text(&self) -> String {
        format!("stdout:\n{}\nstderr:\n{}", self.stdout(), *self.output[1].borrow())
    }

    /// Sends a signal, such as `TERM`.
    pub(crate) async fn signal(&self, name: &str) {
        let id = self.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &id]).status().await.unwrap();
        assert!(sent.success(), "kill -{name} {id}: {sent}");
    }

    /// Waits for the end of the process, at most [`TEST_TIMEOUT`].
    pub(crate) async fn wait(self) -> ProcessOutput {
        self.wait_within(TEST_TIMEOUT).await
    }

    /// Waits for the end of the process, at most `limit`.
    pub(crate) async fn wait_within(mut self, limit: Duration) -> ProcessOutput {
        let Ok(status) = tokio::time::timeout(limit, self.child.wait()).await else {
            panic!("it still runs after {limit:?}\n{}", self.output_text());
        };
        // Its last words may still be in the pipes.
        for output in &mut self.output {
            while output.changed().await.is_ok() {}
        }
        let [stdout, stderr] = &self.output;
        ProcessOutput {
            status: status.unwrap(),
            stdout: stdout.borrow().clone(),
            stderr: stderr.borrow().clone(),
        }
    }
}

/// Where a `moongate` listens, as `host:port`.
#[derive(Debug, Clone)]
pub(crate) struct GatewayAddresses {
    pub(crate) public: String,
    pub(crate) admin: String,
}

fn collect_output(
    readers: &Supervisor,
    mut pipe: impl AsyncRead + Unpin + Send + 'static,
) -> watch::Receiver<String> {
    let (sender, receiver) = watch::channel(String::new());
    readers.spawn("read output", async move {
        let mut whole = Vec::new();
        let mut piece = [0; 4096];
        while let Ok(read @ 1..) = pipe.read(&mut piece).await {
            whole.extend_from_slice(&piece[..read]);
            sender.send_replace(String::from_utf8_lossy(&whole).into_owned());
        }
    });
    receiver
}

async fn find_line(output: &mut watch::Receiver<String>, needle: &str) -> String {
    let line_in = |text: &str| {
        let complete = &text[..text.rfind('\n').unwrap_or(0)];
        complete.lines().find(|line| line.contains(needle)).map(str::to_owned)
    };
    match output.wait_for(|text| line_in(text).is_some()).await {
        Ok(text) => line_in(&text).unwrap_or_default(),
        // Closed without it: the other output, or the deadline, decides.
        Err(_) => std::future::pending().await,
    }
}

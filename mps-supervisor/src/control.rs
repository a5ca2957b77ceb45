//! `nvidia-cuda-mps-control`: with protocol v2 a command on its standard input, with v3 as its
//! arguments (`namespaces`), the answer on its standard output. It ends with 0 whenever it has
//! spoken to the daemon, also where that has refused.

mod namespaces;

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use divvy_host::{Driver, Smi, start_program, wait_while};
use divvy_model::MpsProtocol;

pub use self::namespaces::{Row, ServerState};

/// Longest answer that is kept, in bytes: those of the daemons are some lines.
const LONGEST: usize = 64 << 10;

/// State of a server that waits for its clients to end, after a fatal error of one of them.
const FAULT: &str = "FAULT";

/// Beginning of the answer to a command that the program does not know.
const UNKNOWN: &str = "Unknown command";

/// Start of a daemon, by its users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// With protocol v2, for programs of one user at a time: one of another user ends the server.
    ForOne,
    /// With protocol v2, for programs of all users, as pods have, by this flag.
    ForAll(&'static str),
    /// With protocol v3, for programs of all users.
    Namespaces,
}

/// Why the program did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("{} cannot be run", program.display())]
    Run {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It could not speak to a daemon.
    #[error("`{command}` failed with {status}: {text}")]
    NoDaemon {
        command: String,
        status: ExitStatus,
        text: String,
    },
    /// The daemon has refused.
    #[error("the MPS daemon refused `{command}`: {text}")]
    Refused { command: String, text: String },
    #[error("`{command}` did not end within {within:.1?} and was killed")]
    TimedOut { command: String, within: Duration },
}

/// The program, for the daemon of one target.
#[derive(Debug)]
pub struct Control<'a> {
    pub driver: &'a Driver,
    /// Path inside the driver's root.
    pub program: &'a Path,
    /// Folder of sockets.
    pub pipe: &'a Path,
    /// Folder of logs.
    pub log: &'a Path,
    /// Folder that the daemon and its servers have as their `/dev/shm`; `None`: that of this
    /// process.
    pub memory: Option<&'a Path>,
    /// UUID of the GPU or partition that the daemon and its servers see.
    pub device: &'a str,
}

impl Control<'_> {
    /// Starts the daemon, which goes into the background. A good end proves nothing: where a
    /// daemon runs already, older programs take flags that they do not know for none.
    pub fn launch(&self, how: Launch, within: Duration) -> Result<(), ControlError> {
        let args: &[&str] = match how {
            Launch::ForOne => &["-d"],
            Launch::ForAll(flag) => &[flag, "-d"],
            Launch::Namespaces => &["-p", "3", "-m", "-d"],
        };
        self.run(args, "", within).map(drop)
    }

    /// Asks the daemon to end, once its clients do not work any more, and not much later.
    pub fn quit(&self, protocol: MpsProtocol, within: Duration) -> Result<(), ControlError> {
        match protocol {
            MpsProtocol::V2 => self.ask(&format!("quit -t {}", within.as_secs()), within),
            MpsProtocol::V3 => self.run(&["-p", "3", "-q"], "", within),
        }
        .map(drop)
    }

    /// Asks something that every daemon answers.
    pub fn greet(&self, protocol: MpsProtocol, within: Duration) -> Result<(), ControlError> {
        match protocol {
            MpsProtocol::V2 => self
                .ask("get_default_active_thread_percentage", within)
                .map(drop),
            MpsProtocol::V3 => self.server_state(within).map(drop),
        }
    }

    /// Returns the answer to a command.
    pub fn ask(&self, command: &str, within: Duration) -> Result<String, ControlError> {
        self.run(&[], command, within)
    }

    /// Gives a command that has no answer but a refusal.
    pub fn order(&self, command: &str, within: Duration) -> Result<(), ControlError> {
        let text = self.ask(command, within)?;
        if text.is_empty() {
            return Ok(());
        }
        Err(ControlError::Refused {
            command: command.to_owned(),
            text,
        })
    }

    /// Sets the limit of threads, which is answered with its value.
    pub fn set_threads(&self, percent: u32, within: Duration) -> Result<(), ControlError> {
        let command = format!("set_default_active_thread_percentage {percent}");
        let text = self.ask(&command, within)?;
        if text
            .parse::<f64>()
            .is_ok_and(|set| (set - f64::from(percent)).abs() < 0.05)
        {
            return Ok(());
        }
        Err(ControlError::Refused { command, text })
    }

    /// Sets the limit of memory. By the number of the GPU: a limit by UUID is taken for none of the
    /// first GPU.
    pub fn set_memory(&self, mib: u64, within: Duration) -> Result<(), ControlError> {
        // What is read back is rounded, so that it proves nothing.
        self.order(
            &format!("set_default_device_pinned_mem_limit 0 {mib}M"),
            within,
        )
    }

    /// Returns the processes of the daemon's servers.
    pub fn servers(&self, within: Duration) -> Result<Vec<u32>, ControlError> {
        let text = self.ask("get_server_list", within)?;
        let pids: Option<Vec<u32>> = text.lines().map(|line| line.trim().parse().ok()).collect();
        pids.ok_or_else(|| ControlError::Refused {
            command: "get_server_list".to_owned(),
            text,
        })
    }

    /// Returns the state of a server, in the daemon's words; `None` where the program does not know
    /// the command.
    pub fn state_of(&self, server: u32, within: Duration) -> Result<Option<String>, ControlError> {
        let state = self.ask(&format!("get_server_status {server}"), within)?;
        Ok(Some(state).filter(|state| !state.starts_with(UNKNOWN)))
    }

    /// Returns whether one of the daemon's servers is in the state FAULT, and with it the number of
    /// its clients, if it is known. An answer of other words is no fault, and no list without
    /// clients: nothing is ended because of words that are not known.
    pub fn faulty_server(&self, within: Duration) -> Result<Option<Option<u32>>, ControlError> {
        for server in self.servers(within)? {
            let state = self.state_of(server, within)?.unwrap_or_default();
            if state.eq_ignore_ascii_case(FAULT) {
                let clients = self.ask(&format!("get_client_list {server}"), within)?;
                let pids = clients.lines().map(|line| line.trim().parse::<u32>());
                let pids: Result<Vec<_>, _> = pids.collect();
                return Ok(Some(
                    pids.ok().and_then(|all| u32::try_from(all.len()).ok()),
                ));
            }
        }
        Ok(None)
    }

    /// Runs the program with these arguments and this on its standard input, and returns what it
    /// has written.
    pub fn run(
        &self,
        args: &[&str],
        input: &str,
        within: Duration,
    ) -> Result<String, ControlError> {
        let named = if input.is_empty() {
            args.join(" ")
        } else {
            input.to_owned()
        };
        let failed = |source| ControlError::Run {
            program: self.driver.root.see(self.program),
            source,
        };
        // Nothing of our own environment: CUDA_MPS_PROTOCOL_VERSION would choose another protocol.
        let mut command = Smi::new().program(self.driver, self.program, self.memory);
        command
            .env("CUDA_MPS_PIPE_DIRECTORY", self.pipe)
            .env("CUDA_MPS_LOG_DIRECTORY", self.log)
            .env("CUDA_VISIBLE_DEVICES", self.device)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = start_program(&mut command, within).map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that ends without reading has an exit status that says more.
            drop(writeln!(stdin, "{input}"));
        }
        // Answers are on its standard output, and why there is none on the other.
        let mut texts = [Said::of(child.stdout.take()), Said::of(child.stderr.take())];
        // Read meanwhile: a program that has written more than a pipe holds waits for its reader.
        let read = || texts.iter_mut().for_each(Said::read);
        let Some(status) = wait_while(&mut child, within, read).map_err(failed)? else {
            drop(child.kill());
            drop(child.wait());
            return Err(ControlError::TimedOut {
                command: named,
                within,
            });
        };
        texts.iter_mut().for_each(Said::read);
        let [text, errors] = texts.map(Said::text);
        if status.success() {
            Ok(text)
        } else {
            let both = [text, errors].into_iter().filter(|text| !text.is_empty());
            Err(ControlError::NoDaemon {
                command: named,
                status,
                text: both.collect::<Vec<_>>().join(" / "),
            })
        }
    }
}

/// Answer of a program, as far as it is kept.
struct Said {
    from: Option<OwnedFd>,
    text: Vec<u8>,
}

impl Said {
    /// Begins to read. Only what is there: a daemon that the program has started may hold the pipe.
    fn of(from: Option<impl Into<OwnedFd>>) -> Self {
        let from = from.map(Into::into).filter(|from: &OwnedFd| {
            let flags = rustix::fs::fcntl_getfl(from);
            let set = flags.and_then(|flags| {
                rustix::fs::fcntl_setfl(from, flags | rustix::fs::OFlags::NONBLOCK)
            });
            set.is_ok()
        });
        let text = Vec::new();
        Self { from, text }
    }

    /// Reads what is there now, and keeps the beginning: what it talks to may be a container that
    /// has put itself in the daemon's place.
    fn read(&mut self) {
        let Some(from) = &self.from else { return };
        let mut some = [0; 4096];
        // In each look no more than a pipe holds.
        for _ in 0..16 {
            match rustix::io::read(from, &mut some) {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    let left = LONGEST.saturating_sub(self.text.len()).min(read);
                    self.text.extend(some.get(..left).unwrap_or_default());
                }
            }
        }
    }

    fn text(self) -> String {
        String::from_utf8_lossy(&self.text).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use divvy_host::fixture::Fixture;
    use divvy_host::{DriverAt, HostRoot};

    use super::*;

    #[test]
    fn a_program_that_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(Vec::new()).build(dir.path()).unwrap();
        let host = HostRoot::under(dir.path());
        let driver = DriverAt::default().find(&host).unwrap();
        let control = Control {
            driver: &driver,
            program: Path::new("usr/bin/nvidia-cuda-mps-control"),
            pipe: dir.path(),
            log: dir.path(),
            memory: None,
            device: "GPU-1",
        };
        let error = control.ask("get_server_list", Duration::from_secs(5));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("usr/bin/nvidia-cuda-mps-control"), "{text}");
    }

    /// The stand-in for NVIDIA's program writes this, and waits until it is read.
    #[test]
    fn an_answer_that_no_pipe_holds_is_read_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(Vec::new()).build(dir.path()).unwrap();
        let program = Path::new("usr/bin/nvidia-cuda-mps-control");
        let text = "#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' a\necho end >&2\n";
        fs_err::write(dir.path().join(program), text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs_err::set_permissions(dir.path().join(program), mode).unwrap();
        let host = HostRoot::under(dir.path());
        let driver = DriverAt::default().find(&host).unwrap();
        let control = Control {
            driver: &driver,
            program,
            pipe: dir.path(),
            log: dir.path(),
            memory: None,
            device: "GPU-1",
        };
        let answer = control.ask("get_server_list", Duration::from_secs(20));
        assert_eq!(answer.unwrap(), "a".repeat(LONGEST));
    }
}

//! Running programs: those that end (their output is the result) and those that a cluster keeps
//! running.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::namespaces::Namespaces;
use crate::wait::poll;

/// Progress for the person who waits.
pub(crate) fn say(text: &str) {
    // Output that cannot be written does not fail the run.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A command for people: without the environment, which is long and always the same.
fn shown(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    format!(
        "{} {}",
        command.get_program().to_string_lossy(),
        words.join(" ")
    )
}

/// Runs a program to its end with our own output; anything but success is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{}: {status}", shown(command));
    }
    Ok(())
}

/// Runs a program to its end and returns its output; anything but success is an error with what it
/// said.
pub fn output(command: &mut Command) -> Result<String> {
    output_of(command, "")
}

/// [`output`] for a program that reads `input`.
pub fn output_of(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input says itself what is wrong.
        let _ = stdin.write_all(input.as_bytes());
    }
    let done = child.wait_with_output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("{}: {}: {}", shown(command), done.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// A signal that a program is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// `SIGTERM`: it may finish what it is doing.
    Term,
    /// `SIGKILL`: it may not.
    Kill,
    /// `SIGSTOP`: it does nothing until it may go on.
    Stop,
    /// `SIGCONT`: it goes on.
    Continue,
}

/// A long-running program in a cluster's namespaces, by name: a component, or a host process of a
/// test.
///
/// The first process of the namespaces starts it (and is its parent), so it outlives its caller.
#[derive(Debug)]
pub struct Daemon<'a> {
    namespaces: &'a Namespaces,
    name: String,
}

impl<'a> Daemon<'a> {
    /// The program with this name, running or not.
    pub fn new(namespaces: &'a Namespaces, name: impl Into<String>) -> Self {
        Self {
            namespaces,
            name: name.into(),
        }
    }

    /// Says how the program is called: `start` from now on runs this.
    pub fn define(&self, args: &[String], env: &[(String, String)]) -> Result<()> {
        let mut script: Vec<String> = env
            .iter()
            .map(|(key, value)| format!("export {key}={}\n", quote(value)))
            .collect();
        let quoted: Vec<String> = args.iter().map(|arg| quote(arg)).collect();
        script.push(format!("exec {}\n", quoted.join(" ")));
        fs::write(
            self.namespaces
                .state()
                .join("run")
                .join(format!("{}.sh", self.name)),
            script.concat(),
        )?;
        Ok(())
    }

    /// Starts the program as it was last defined. Its log goes on where it was.
    pub fn start(&self) -> Result<()> {
        if self.is_running() {
            return Ok(());
        }
        let pid_file = self.pid_file();
        if pid_file.exists() {
            fs::remove_file(&pid_file)?;
        }
        self.namespaces.ask(&self.name)?;
        poll(
            &format!("start of {}", self.name),
            Duration::from_secs(5),
            || Ok(pid_file.exists()),
        )
    }

    /// Ends the program and waits until it is gone; with `Term` it is killed after 20 s.
    pub fn stop(&self, signal: Signal) -> Result<()> {
        let Some(pid) = self.pid() else { return Ok(()) };
        let gone = |wait| {
            poll(&format!("end of {}", self.name), wait, || {
                Ok(!self.is_running())
            })
        };
        if signal == Signal::Term
            && self.namespaces.send(pid, signal).is_ok()
            && gone(Duration::from_secs(20)).is_ok()
        {
            return Ok(());
        }
        if self.is_running() {
            self.namespaces.send(pid, Signal::Kill)?;
        }
        gone(Duration::from_secs(5))
    }

    /// Holds the program (`SIGSTOP`) until the answer is dropped.
    pub fn hold(&self) -> Result<Held<'a>> {
        let pid = self
            .pid()
            .with_context(|| format!("{} does not run", self.name))?;
        self.namespaces.send(pid, Signal::Stop)?;
        Ok(Held {
            namespaces: self.namespaces,
            pid,
        })
    }

    /// Ends the program (`Term`) and starts it again.
    pub fn restart(&self) -> Result<()> {
        self.stop(Signal::Term)?;
        self.start()
    }

    /// Its process id inside the namespaces, while it runs.
    pub fn pid(&self) -> Option<u32> {
        let pid = fs::read_to_string(self.pid_file())
            .ok()?
            .trim()
            .parse()
            .ok()?;
        self.namespaces.is_alive(pid).then_some(pid)
    }

    /// Returns true if it runs.
    pub fn is_running(&self) -> bool {
        self.pid().is_some()
    }

    /// The file that has everything it ever wrote.
    pub fn log(&self) -> PathBuf {
        self.namespaces
            .state()
            .join("logs")
            .join(format!("{}.log", self.name))
    }

    /// The last lines of its log, for an error message.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines
            .get(lines.len().saturating_sub(15)..)
            .unwrap_or_default()
            .join("\n")
    }

    fn pid_file(&self) -> PathBuf {
        self.namespaces.state().join("pids").join(&self.name)
    }
}

/// A program that is held, until dropped.
#[derive(Debug)]
pub struct Held<'a> {
    namespaces: &'a Namespaces,
    pid: u32,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.namespaces.send(self.pid, Signal::Continue) {
            say(&format!("process {} is still stopped: {error:#}", self.pid));
        }
    }
}

/// Quotes a word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

//! The script by which NVIDIA's programs and the stand-in are compared: the same steps over either,
//! and what was seen as text without what differs from run to run.

use std::fmt::Write as _;
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::steps::{STEPS, Step, Until};

const CONTROL: &str = "nvidia-cuda-mps-control";
/// A command takes milliseconds.
const WITHIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);
/// So many looks at a log show that it is whole.
const SETTLED: u32 = 20;
/// Lines by which a daemon logs that it was asked.
const OF_COMMANDS: [&str; 4] = ["Accepting connection...", "NEW UI", "Cmd:", "UI closed"];
/// The user who is not the daemon's.
const ANOTHER: u32 = 65_534;

/// Runs the script over the programs in a folder, whose server is the stand-in's, in a scratch
/// folder that is empty. `words` are fault words for the whole of it. Returns what was seen.
pub fn transcript(bin: &Path, scratch: &Path, words: &[&str]) -> io::Result<String> {
    let run = Run::new(bin, scratch, words)?;
    let done = run.all();
    // Also of a script that failed nothing stays.
    let left = run.processes();
    for pid in &left {
        kill(*pid);
    }
    let text = done?;
    if left.is_empty() {
        Ok(text)
    } else {
        Err(io::Error::other(format!("processes are left:\n{text}")))
    }
}

struct Run<'a> {
    bin: PathBuf,
    pipe: PathBuf,
    log: PathBuf,
    words: &'a [&'a str],
}

/// State that changes from step to step.
#[derive(Default)]
struct Seen {
    text: String,
    /// Length of the daemon's log that was shown.
    shown: usize,
    /// The last server that was started.
    server: Option<String>,
}

impl<'a> Run<'a> {
    fn new(bin: &Path, scratch: &Path, words: &'a [&'a str]) -> io::Result<Self> {
        let [pipe, log] = ["pipe", "log"].map(|name| scratch.join(name));
        for dir in [scratch, &pipe, &log] {
            fs_err::create_dir_all(dir)?;
            // Another user reaches the sockets.
            fs_err::set_permissions(dir, std::fs::Permissions::from_mode(0o755))?;
        }
        let bin = fs_err::canonicalize(bin)?;
        Ok(Self {
            bin,
            pipe,
            log,
            words,
        })
    }

    fn all(&self) -> io::Result<String> {
        self.faults("")?;
        let mut seen = Seen::default();
        for step in STEPS {
            self.step(step, &mut seen)?;
        }
        Ok(seen.text)
    }

    fn step(&self, step: &Step, seen: &mut Seen) -> io::Result<()> {
        match *step {
            Step::Title(title) => seen.text += &format!("## {title}\n"),
            Step::Run(args) => {
                let ran = self.run(args, "", false, seen)?;
                seen.text += &format!("$ {}\n{ran}", args.join(" "));
            }
            Step::Start => self.start(seen)?,
            Step::Say(command) => {
                let asked = command.replace("SERVER", seen.server.as_deref().unwrap_or("1"));
                let ran = self.run(&[], &asked, false, seen)?;
                seen.text += &format!("< {}\n{ran}", command.escape_default());
            }
            Step::Quit(command) => {
                let ran = self.run(&[], command, false, seen)?;
                let said = ran.rsplit_once('=').map_or("", |(said, _)| said);
                seen.text += &format!("< {}\n{said}= any\n", command.escape_default());
            }
            Step::OtherSays(command) => {
                let ran = self.run(&[], command, true, seen)?;
                seen.text += &format!("< {} (another user)\n{ran}", command.escape_default());
            }
            Step::Faults(words) => {
                let server = seen.server.as_deref().unwrap_or_default();
                self.faults(&words.replace("SERVER", server))?;
            }
            Step::Wait(until) => self.wait(until, seen)?,
            Step::Files => seen.text += &self.files()?,
            Step::Log => {
                let new = self.new_log(seen)?;
                seen.text += &new;
            }
            Step::Kill => {
                self.daemons().into_iter().for_each(kill);
                self.wait(Until::Gone, seen)?;
            }
        }
        Ok(())
    }

    /// Starts a daemon for all users, or one for its own where the program has no other.
    fn start(&self, seen: &mut Seen) -> io::Result<()> {
        for args in [&["-multiuser-server", "-d"][..], &["-d"]] {
            let ran = self.run(args, "", false, seen)?;
            seen.text += &format!("$ {}\n{ran}", args.join(" "));
            if ran.ends_with("= 0\n") {
                break;
            }
        }
        Ok(())
    }

    fn faults(&self, words: &str) -> io::Result<()> {
        let all = [&self.words.join("\n"), words].join("\n");
        fs_err::write(self.bin.join("faults"), all)
    }

    fn wait(&self, until: Until, seen: &mut Seen) -> io::Result<()> {
        let begun = Instant::now();
        loop {
            let log = self.read_log()?;
            let new = log.get(seen.shown..).unwrap_or_default();
            let mut started = new.lines().filter_map(|line| {
                let (_, rest) = line.split_once("Starting new server ")?;
                rest.split(' ').next()
            });
            if let Some(server) = started.next_back() {
                seen.server = Some(server.to_owned());
            }
            let is_so = match until {
                Until::Logged(text) => new.contains(text),
                Until::Gone => self.daemons().is_empty(),
            };
            if is_so {
                return Ok(());
            }
            if begun.elapsed() > WITHIN {
                return Err(io::Error::other(format!(
                    "{until:?} has not come, after\n{}\nthe log:\n{log}",
                    seen.text
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Runs the control program. Returns its answers and its status.
    fn run(&self, args: &[&str], input: &str, other: bool, seen: &Seen) -> io::Result<String> {
        let mut command = Command::new(self.bin.join(CONTROL));
        command
            .args(args)
            .env_clear()
            // The daemon looks for its server there.
            .env(
                "PATH",
                std::env::join_paths([&self.bin]).map_err(io::Error::other)?,
            )
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe)
            .env("CUDA_MPS_LOG_DIRECTORY", &self.log)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if other {
            command.uid(ANOTHER).gid(ANOTHER);
        }
        let mut child = spawn(&mut command)?;
        if let Some(mut stdin) = child.stdin.take() {
            drop(stdin.write_all(input.as_bytes()));
        }
        let status = ended(&mut child)?;
        let mut text = String::new();
        for (mark, said) in [
            ('>', read(child.stdout.take())?),
            ('!', read(child.stderr.take())?),
        ] {
            for line in self.without_names(&said, seen).lines() {
                writeln!(text, "{mark} {line}").map_err(io::Error::other)?;
            }
        }
        let status = status.and_then(|status| status.code());
        let status = status.map_or_else(|| "none".to_owned(), |code| code.to_string());
        Ok(format!("{text}= {status}\n"))
    }

    /// Replaces what differs from run to run.
    fn without_names(&self, text: &str, seen: &Seen) -> String {
        if text.contains("Copyright") {
            return "(help)".to_owned();
        }
        let mut text = text
            .replace(&*self.pipe.to_string_lossy(), "PIPE")
            .replace(&*self.log.to_string_lossy(), "LOG");
        if let Some(server) = &seen.server {
            text = text.replace(server, "SERVER");
        }
        text
    }

    /// Lists the folder of sockets.
    fn files(&self) -> io::Result<String> {
        let mut lines = Vec::new();
        for entry in fs_err::read_dir(&self.pipe)? {
            let entry = entry?;
            let (about, kind) = (entry.metadata()?, entry.file_type()?);
            let kind = match () {
                () if kind.is_socket() => 's',
                () if kind.is_fifo() => 'p',
                () => '-',
            };
            let name = entry.file_name().to_string_lossy().into_owned();
            lines.push(format!("/ {name} {kind}{:o}\n", about.mode() & 0o777));
        }
        lines.sort();
        Ok(lines.concat())
    }

    fn read_log(&self) -> io::Result<String> {
        match fs_err::read(self.log.join("control.log")) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(error) => Err(error),
        }
    }

    /// Returns what is new in the log of the daemon, but for the lines of commands.
    fn new_log(&self, seen: &mut Seen) -> io::Result<String> {
        // The daemon writes it in a thread of its own: it is whole once it does not grow any more.
        let mut log = self.read_log()?;
        let mut same = 0;
        while same < SETTLED {
            std::thread::sleep(LOOK);
            let now = self.read_log()?;
            same = if now == log { same + 1 } else { 0 };
            log = now;
        }
        let new = log.get(seen.shown..).unwrap_or_default();
        let of_commands = |text: &&str| OF_COMMANDS.iter().any(|one| text.starts_with(one));
        let lines = new
            .lines()
            .filter_map(|line| Some(line.split_once("] ")?.1.trim_end()))
            .filter(|line| !of_commands(line));
        let text = lines.map(|line| format!("# {}\n", self.without_names(line, seen)));
        let text = text.collect();
        seen.shown = log.len();
        Ok(text)
    }

    fn processes(&self) -> Vec<u32> {
        running(|exe| exe.starts_with(&self.bin))
    }

    fn daemons(&self) -> Vec<u32> {
        running(|exe| exe == self.bin.join(CONTROL))
    }
}

/// Returns the processes of these programs that have not ended.
fn running(of: impl Fn(&Path) -> bool) -> Vec<u32> {
    let entries = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let runs = |pid: &u32| {
        // A process that has ended and was not waited for has none.
        fs_err::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| of(&exe))
    };
    pids.filter(runs).collect()
}

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok();
    if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
        // Gone in between.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Starts a program whose file may have been copied a moment ago.
fn spawn(command: &mut Command) -> io::Result<Child> {
    loop {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(LOOK);
            }
            other => return other,
        }
    }
}

/// Waits for a program to end; `None` of one that did not and was killed.
fn ended(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    while begun.elapsed() < WITHIN {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(LOOK);
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

fn read(from: Option<impl Read>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        from.read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

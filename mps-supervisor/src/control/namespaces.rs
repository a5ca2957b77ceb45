//! Commands of protocol v3: a server with namespaces. Only the form with commas is read; the table
//! cuts numbers. Each effect is read back, since a daemon can refuse a command with exit status 0.

use std::path::PathBuf;
use std::time::Duration;

use divvy_model::{MpsNamespace, MpsNamespaceName};

use super::{Control, ControlError, FAULT};

/// The namespace of clients that name none, as users of the daemon's own folder of sockets do.
const DEFAULT: &str = "default";
/// Least limits that can be set: nothing of ours is a client there.
const LEAST_CORES: u32 = 1;
const LEAST_MIB: u64 = 64;
const LIST: &str = "--format=csv,noheader";

/// State of a server, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// It serves clients.
    Ready,
    /// It will.
    Starting,
    /// It has failed, or is not listed.
    Failed,
}

/// A namespace as the daemon lists it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub name: String,
    /// Limit of threads in percent; `None` if none is set.
    pub percent: Option<f64>,
    /// True if a limit of memory is set. Its amount is rounded, so that it proves nothing.
    pub has_memory: bool,
    /// True if its server is said to be in the state FAULT.
    pub is_faulty: bool,
}

impl Row {
    /// Returns whether the limits are these, as far as it can be seen. A board rounds a limit of
    /// threads down to what it can do.
    fn keeps(&self, cores: u32, memory_mib: Option<u64>) -> bool {
        let most = f64::from(cores) + 0.05;
        self.percent
            .is_some_and(|percent| percent > 0.0 && percent < most)
            && (self.has_memory || memory_mib.is_none())
    }

    /// Returns whether it is this namespace, with its limits.
    pub fn is(&self, namespace: &MpsNamespace) -> bool {
        self.name == namespace.name.to_string() && self.keeps(namespace.cores, namespace.memory_mib)
    }
}

impl Control<'_> {
    /// Makes the server, for users of all UIDs on this GPU alone. A UUID that the driver does not
    /// know is taken, and the server dies of it.
    pub fn create_server(&self, within: Duration) -> Result<(), ControlError> {
        let devices = format!("--allowed-devices={}", self.device);
        self.v3(
            &[
                "server",
                "create",
                MpsNamespaceName::SERVER,
                "--uid=0",
                &devices,
            ],
            within,
        )
        .map(drop)
    }

    /// Returns the state of the server.
    pub fn server_state(&self, within: Duration) -> Result<ServerState, ControlError> {
        Ok(server_state(&self.list("server", 4, within)?))
    }

    /// Gives next to nothing to clients that come without a namespace: theirs is not limited by the
    /// server.
    pub fn cap_default(&self, within: Duration) -> Result<(), ControlError> {
        self.limit(DEFAULT, LEAST_CORES, Some(LEAST_MIB), within)
    }

    /// Returns the namespaces that there are, the default one among them.
    pub fn namespaces(&self, within: Duration) -> Result<Vec<Row>, ControlError> {
        Ok(rows(&self.list("namespace", 5, within)?))
    }

    /// Returns the list of what a daemon has, whose lines have at least so many fields. A refusal
    /// comes with exit status 0 too: it is no list, and least of all an empty one.
    fn list(&self, what: &str, least: usize, within: Duration) -> Result<String, ControlError> {
        let text = self.v3(&[what, "list", LIST], within)?;
        if is_list(&text, least) {
            return Ok(text);
        }
        Err(ControlError::Refused {
            command: format!("{what} list"),
            text,
        })
    }

    /// Returns the number of clients of the server. A refusal comes with exit status 0 too, and is
    /// no list.
    pub fn count_clients(&self, within: Duration) -> Result<u32, ControlError> {
        let text = self.v3(&["client", "list", LIST], within)?;
        let lines = || text.lines().filter(|line| !line.trim().is_empty());
        if lines().any(|line| fields(line).get(1) != Some(&MpsNamespaceName::SERVER)) {
            return Err(ControlError::Refused {
                command: "client list".to_owned(),
                text,
            });
        }
        Ok(u32::try_from(lines().count()).unwrap_or(u32::MAX))
    }

    /// Makes a namespace with its limits.
    pub fn create_namespace(
        &self,
        namespace: &MpsNamespace,
        within: Duration,
    ) -> Result<(), ControlError> {
        let (name, server) = (namespace.name.to_string(), of_server());
        self.v3(&["namespace", "create", &name, &server], within)?;
        self.limit(&name, namespace.cores, namespace.memory_mib, within)
    }

    /// Ends a namespace. `force`: with its clients.
    pub fn delete_namespace(
        &self,
        name: MpsNamespaceName,
        force: bool,
        within: Duration,
    ) -> Result<(), ControlError> {
        let (name, server) = (name.to_string(), of_server());
        let mut words = vec!["namespace", "delete", &name, &server];
        words.extend(force.then_some("--force"));
        self.v3(&words, within).map(drop)
    }

    /// Returns the folder of sockets of a namespace.
    pub fn folder_of(
        &self,
        name: MpsNamespaceName,
        within: Duration,
    ) -> Result<PathBuf, ControlError> {
        let name = name.to_string();
        let asks = |what| {
            let words = ["namespace", "get", &name, MpsNamespaceName::SERVER, what];
            self.v3(&words, within)
        };
        let is_path = |text: &String| text.starts_with('/');
        // It is written in both ways: who does not know the word says so, with either exit status.
        // A daemon that does not answer in time is not asked again.
        let first = match asks("pipe-directory") {
            Ok(text) if is_path(&text) => return Ok(text.into()),
            Ok(text) => ControlError::Refused {
                command: "namespace get pipe-directory".to_owned(),
                text,
            },
            Err(error @ (ControlError::NoDaemon { .. } | ControlError::Refused { .. })) => error,
            Err(error) => return Err(error),
        };
        match asks("pipe_directory") {
            Ok(text) if is_path(&text) => Ok(text.into()),
            _ => Err(first),
        }
    }

    /// Sets the limits of a namespace, and reads them back.
    fn limit(
        &self,
        name: &str,
        cores: u32,
        memory_mib: Option<u64>,
        within: Duration,
    ) -> Result<(), ControlError> {
        let limits = [
            Some(format!("--active-thread-percentage={cores}")),
            memory_mib.map(|mib| format!("--pinned-memory-limit={mib}M")),
        ];
        let server = of_server();
        let mut answers = Vec::new();
        for limit in limits.iter().flatten() {
            answers.push(self.v3(&["namespace", "set", name, &server, limit], within)?);
        }
        let listed = self.namespaces(within)?;
        let mut named = listed.iter().filter(|row| row.name == name);
        if named.any(|row| row.keeps(cores, memory_mib)) {
            return Ok(());
        }
        answers.push(format!("it lists {listed:?}"));
        Err(ControlError::Refused {
            command: format!("namespace set {name}"),
            text: answers.join(" / "),
        })
    }

    fn v3(&self, words: &[&str], within: Duration) -> Result<String, ControlError> {
        let args: Vec<&str> = ["-p", "3"].iter().chain(words).copied().collect();
        self.run(&args, "", within)
    }
}

fn of_server() -> String {
    format!("--server={}", MpsNamespaceName::SERVER)
}

/// Reads the state of our server from the list: name, UID, process, state.
fn server_state(text: &str) -> ServerState {
    let mut lines = text.lines().map(fields);
    let ours = lines.find(|fields| fields.first() == Some(&MpsNamespaceName::SERVER));
    match ours.and_then(|fields| fields.get(3).map(|state| state.to_ascii_lowercase())) {
        Some(state) if state == "ready" || state == "active" => ServerState::Ready,
        Some(state) if state == "initializing" => ServerState::Starting,
        Some(_) | None => ServerState::Failed,
    }
}

/// Reads the namespaces of our server from the list: name, server, state of the server, limit of
/// memory, limit of threads. A line that is none is left out.
fn rows(text: &str) -> Vec<Row> {
    let row = |fields: Vec<&str>| match fields[..] {
        [name, MpsNamespaceName::SERVER, state, memory, percent, ..] => Some(Row {
            name: name.to_owned(),
            is_faulty: state.eq_ignore_ascii_case(FAULT),
            percent: percent.trim_end_matches('%').parse().ok(),
            has_memory: memory.starts_with(|first: char| first.is_ascii_digit()) && memory != "0",
        }),
        _ => None,
    };
    text.lines().map(fields).filter_map(row).collect()
}

/// Says whether a text is a list with at least so many fields in a line: an empty one, too.
fn is_list(text: &str, least: usize) -> bool {
    let mut lines = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .peekable();
    lines.peek().is_none() || lines.any(|line| fields(line).len() >= least)
}

fn fields(line: &str) -> Vec<&str> {
    line.split(',').map(str::trim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_the_server_is_read_from_its_line() {
        for (line, expected) in [
            ("s,0,48201,Ready,/p/s,GPU-1,-", ServerState::Ready),
            ("s, 0, 48201, ACTIVE, /p/s, GPU-1, -", ServerState::Ready),
            ("s,0,48201,INITIALIZING,/p/s,GPU-1,-", ServerState::Starting),
            ("s,0,-,FAULT,/p/s,GPU-1,-", ServerState::Failed),
            ("other,0,48201,Ready,/p/other,GPU-1,-", ServerState::Failed),
            ("", ServerState::Failed),
        ] {
            assert_eq!(server_state(line), expected, "{line}");
        }
    }

    #[test]
    fn a_refusal_is_no_list_and_no_lines_are_an_empty_one() {
        for (text, expected) in [
            ("", true),
            ("\n", true),
            ("default,s,Ready,64M,1.00,0,/p\n", true),
            ("a warning\ndefault,s,Ready,64M,1.00,0,/p\n", true),
            ("Unknown command\n", false),
            ("Server is busy, try again\n", false),
        ] {
            assert_eq!(is_list(text, 4), expected, "{text}");
        }
    }

    #[test]
    fn namespaces_are_read_with_the_limits_that_they_have() {
        let text = "default,s,Ready,64M,1.00,0,/p/s/default\n\
                    c_1,s,Ready,-,-,0,/p/s/c_1\n\
                    x,other,Ready,1G,50.00,0,/p/other/x\n\
                    c_2,s,FAULT,-,-,0,/p/s/c_2\n\
                    nonsense";
        let rows = rows(text);
        let found: Vec<_> = rows
            .iter()
            .map(|row| {
                let name = row.name.as_str();
                (name, row.percent, row.has_memory, row.is_faulty)
            })
            .collect();
        assert_eq!(
            found,
            [
                ("default", Some(1.0), true, false),
                ("c_1", None, false, false),
                ("c_2", None, false, true)
            ]
        );
    }

    #[test]
    fn limits_are_kept_only_if_they_are_seen() {
        let row = |percent, has_memory| Row {
            name: "c_0000000000000001".to_owned(),
            percent,
            has_memory,
            is_faulty: false,
        };
        let wanted = MpsNamespace {
            name: "c_0000000000000001".parse().unwrap(),
            cores: 30,
            memory_mib: Some(1024),
        };
        for (row, expected) in [
            (row(Some(30.0), true), true),
            (row(Some(29.1), true), true),
            (row(Some(30.2), true), false),
            (row(Some(0.0), true), false),
            (row(None, true), false),
            (row(Some(30.0), false), false),
        ] {
            assert_eq!(row.is(&wanted), expected, "{row:?}");
        }
    }
}

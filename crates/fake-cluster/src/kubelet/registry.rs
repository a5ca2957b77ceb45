//! Plugin registration: sockets come and go, plugins identify themselves, connections show which
//! are alive.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use divvy_proto::dra::PLUGIN_TYPE;
use divvy_proto::registration::registration_client::RegistrationClient;
use divvy_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tonic::transport::Endpoint;
use tonic::{Response, Status};

use super::Shared;

const LOOK_EVERY: Duration = Duration::from_millis(25);
const DIAL: Duration = Duration::from_secs(10);
const GET_INFO: Duration = Duration::from_secs(1);
const NOTIFY: Duration = Duration::from_secs(5);
/// Registration is tried again after this, doubled up to the second.
const RETRY: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);
const RECONNECT: Duration = Duration::from_millis(50);

/// A registered plugin instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// Driver name.
    pub driver: String,
    /// Service socket.
    pub endpoint: String,
    /// The service that is used: the first of the plugin's list that the kubelet knows.
    pub service: String,
    /// Registration socket.
    pub socket: PathBuf,
    /// True if the service socket accepts connections.
    pub connected: bool,
    /// Number of the registration, counted over all drivers: distinguishes a restarted process from
    /// the one before.
    pub registration: u64,
}

/// Inode and change time: distinguishes a new file under an old name.
type Identity = (u64, i64, i64);

#[derive(Debug)]
struct Socket {
    identity: Identity,
    /// When to try again; `None` while trying and once registered.
    due: Option<Instant>,
    wait: Duration,
    error: Option<String>,
}

/// All sockets and plugins.
#[derive(Debug, Default)]
pub(super) struct Registry {
    sockets: BTreeMap<PathBuf, Socket>,
    plugins: Vec<(Plugin, Alive)>,
    /// When each driver was last seen connected; removed when its slices were wiped.
    last_seen: BTreeMap<String, Instant>,
    /// Number of registrations so far.
    registrations: u64,
}

/// The task that keeps a connection to an instance; ends with it.
#[derive(Debug)]
struct Alive(AbortHandle);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Registry {
    pub(super) fn plugins(&self) -> Vec<Plugin> {
        self.plugins
            .iter()
            .map(|(plugin, _)| plugin.clone())
            .collect()
    }

    pub(super) fn refused(&self) -> Vec<String> {
        let errors = self
            .sockets
            .iter()
            .filter_map(|(path, socket)| socket.error.as_ref().map(|e| (path, e)));
        errors
            .map(|(path, error)| format!("{}: {error}", file_name(path)))
            .collect()
    }

    /// The instance to call: the newest connected one, else the newest.
    pub(super) fn instance(&self, driver: &str) -> Option<Plugin> {
        let ours = || {
            self.plugins
                .iter()
                .rev()
                .map(|(plugin, _)| plugin)
                .filter(|p| p.driver == driver)
        };
        ours()
            .find(|p| p.connected)
            .or_else(|| ours().next())
            .cloned()
    }

    /// Takes note of the files that are there; returns the sockets to register now.
    fn see(&mut self, files: BTreeMap<PathBuf, Identity>, now: Instant) -> Vec<PathBuf> {
        let same = |path: &PathBuf, socket: &Socket| files.get(path) == Some(&socket.identity);
        self.sockets.retain(|path, socket| same(path, socket));
        self.plugins
            .retain(|(plugin, _)| self.sockets.contains_key(&plugin.socket));
        for (path, identity) in files {
            let new = || Socket {
                identity,
                due: Some(now),
                wait: RETRY,
                error: None,
            };
            self.sockets.entry(path).or_insert_with(new);
        }
        let due = self
            .sockets
            .iter_mut()
            .filter(|(_, socket)| socket.due.is_some_and(|due| due <= now));
        due.map(|(path, socket)| {
            socket.due = None;
            path.clone()
        })
        .collect()
    }

    /// Drivers without a connected instance for longer than `patience`, each only once.
    fn gone(&mut self, now: Instant, patience: Duration) -> Vec<String> {
        for (plugin, _) in self.plugins.iter().filter(|(plugin, _)| plugin.connected) {
            self.last_seen.insert(plugin.driver.clone(), now);
        }
        let late = |seen: &Instant| now.duration_since(*seen) >= patience;
        let gone: Vec<String> = self
            .last_seen
            .iter()
            .filter(|(_, seen)| late(seen))
            .map(|(d, _)| d.clone())
            .collect();
        for driver in &gone {
            self.last_seen.remove(driver);
        }
        gone
    }

    /// The checks of the real kubelet; returns the service to use.
    fn validate(
        &self,
        socket: &Path,
        info: &PluginInfo,
        services: &[String],
    ) -> Result<String, String> {
        if info.r#type != PLUGIN_TYPE {
            return Err(format!(
                "plugin type {:?} is not handled, expected {PLUGIN_TYPE:?}",
                info.r#type
            ));
        }
        if info.name.is_empty() || info.endpoint.is_empty() {
            return Err("name and endpoint must not be empty".into());
        }
        let taken =
            |p: &Plugin| p.driver == info.name && p.endpoint == info.endpoint && p.socket != socket;
        if self.plugins.iter().any(|(plugin, _)| taken(plugin)) {
            return Err(format!(
                "endpoint {} of driver {} is already registered",
                info.endpoint, info.name
            ));
        }
        let known = info
            .supported_versions
            .iter()
            .find(|version| services.contains(version));
        known.cloned().ok_or_else(|| {
            let offered = info.supported_versions.join(", ");
            format!(
                "no service of the plugin is supported: it offers [{offered}], needed is one of {services:?}"
            )
        })
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Looks for sockets until the kubelet is dropped.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let files = match sockets_in(&shared.config.registry_dir()) {
            Ok(files) => files,
            Err(error) => {
                tracing::warn!(%error, "the plugin registry folder cannot be read");
                continue;
            }
        };
        let now = Instant::now();
        let (due, gone, changed) = {
            let registry = &mut shared.lock().registry;
            let before = registry.plugins.len();
            let due = registry.see(files, now);
            let gone = registry.gone(now, shared.config.wipe_after);
            (due, gone, registry.plugins.len() != before)
        };
        if changed {
            shared.wake();
        }
        for driver in gone {
            shared
                .config
                .api
                .wipe_slices(&shared.config.node, Some(&driver));
        }
        for socket in due {
            tokio::spawn(register(shared.clone(), socket));
        }
    }
}

/// Sockets of the folder and its subfolders; names with a leading dot are ignored, as the kubelet
/// does.
fn sockets_in(folder: &Path) -> std::io::Result<BTreeMap<PathBuf, Identity>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let entry = entry?;
            // A file may vanish between the listing and this look.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.file_type().is_socket() {
                found.insert(
                    entry.path(),
                    (metadata.ino(), metadata.ctime(), metadata.ctime_nsec()),
                );
            }
        }
    }
    Ok(found)
}

/// Makes an attempt: dial, ask, check, register, notify.
async fn register(shared: Arc<Shared>, socket: PathBuf) {
    let result = attempt(&shared, &socket).await;
    {
        let mut state = shared.lock();
        if let Some(entry) = state.registry.sockets.get_mut(&socket) {
            if let Err(why) = &result {
                entry.error = Some(why.clone());
                entry.due = Instant::now().checked_add(entry.wait);
                entry.wait = (entry.wait * 2).min(RETRY_MAX);
            } else {
                entry.error = None;
                entry.wait = RETRY;
            }
        }
    }
    shared.wake();
}

async fn attempt(shared: &Arc<Shared>, socket: &Path) -> Result<(), String> {
    // The real kubelet's `:authority` is the percent-encoded path, which the `http` crate of the
    // plugin's server takes only with an `@` in it. No Rust client would send it, so the rule
    // stands here.
    if !file_name(socket).contains('@') {
        let why = "a server made of tonic refuses the kubelet's `:authority` of a socket without `@` in its name";
        return Err(format!("GetInfo: {why}"));
    }
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()));
    let endpoint = endpoint
        .map_err(|error| error.to_string())?
        .connect_timeout(DIAL);
    let channel = endpoint
        .connect()
        .await
        .map_err(|_| "GetInfo: the socket does not answer".to_owned())?;
    let mut client = RegistrationClient::new(channel);
    let info = within("GetInfo", GET_INFO, client.get_info(InfoRequest {})).await?;
    let verdict = enter(shared, socket, &info);
    let status = RegistrationStatus {
        plugin_registered: verdict.is_ok(),
        error: verdict.clone().err().unwrap_or_default(),
    };
    let call = client.notify_registration_status(status);
    let noted = within("NotifyRegistrationStatus", NOTIFY, call).await;
    if noted.is_err() {
        // The plugin did not take note: out again, and from scratch.
        shared
            .lock()
            .registry
            .plugins
            .retain(|(plugin, _)| plugin.socket != socket);
    }
    verdict.and(noted.map(drop))
}

async fn within<T>(
    method: &str,
    deadline: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, String> {
    let answer = timeout(deadline, call).await;
    let answer = answer.map_err(|_| format!("{method}: no answer within {deadline:?}"))?;
    answer
        .map(Response::into_inner)
        .map_err(|status| format!("{method}: {}", status.message()))
}

fn enter(shared: &Arc<Shared>, socket: &Path, info: &PluginInfo) -> Result<(), String> {
    let mut state = shared.lock();
    let registry = &mut state.registry;
    if !registry.sockets.contains_key(socket) {
        return Err("the socket is gone".into());
    }
    let service = registry.validate(socket, info, &shared.config.services)?;
    registry.registrations += 1;
    let registration = registry.registrations;
    let endpoint = info.endpoint.clone();
    let task = tokio::spawn(keep_connected(
        shared.clone(),
        socket.to_path_buf(),
        PathBuf::from(&endpoint),
    ));
    let alive = Alive(task.abort_handle());
    let plugin = Plugin {
        driver: info.name.clone(),
        endpoint,
        service,
        socket: socket.to_path_buf(),
        connected: false,
        registration,
    };
    registry.plugins.retain(|(known, _)| known.socket != socket);
    registry
        .last_seen
        .insert(plugin.driver.clone(), Instant::now());
    registry.plugins.push((plugin, alive));
    Ok(())
}

/// Holds a connection to the service socket, and notes when there is none.
async fn keep_connected(shared: Arc<Shared>, socket: PathBuf, endpoint: PathBuf) {
    let note = |connected: bool| {
        let mut state = shared.lock();
        for (plugin, _) in state
            .registry
            .plugins
            .iter_mut()
            .filter(|(plugin, _)| plugin.socket == socket)
        {
            plugin.connected = connected;
        }
        drop(state);
        shared.wake();
    };
    loop {
        if let Ok(mut connection) = UnixStream::connect(&endpoint).await {
            note(true);
            // The server says nothing before it hears a client: what comes next is the end.
            let mut nothing = [0_u8; 64];
            while matches!(connection.read(&mut nothing).await, Ok(1..)) {}
            note(false);
        }
        sleep(RECONNECT).await;
    }
}

//! Makes the tasks of the plugin and the channels between them. ARCHITECTURE.md has a table of what
//! each reads and writes.

use std::sync::Arc;
use std::time::Duration;

use divvy_controller::{PublishStatus, PublisherConfig, ServerClock, with_deadline};
use divvy_executor::{Executor, HeldDevice, MpsServers};
use divvy_host::HostRoot;
use divvy_model::GpuDriver;
use divvy_offer::{Pool, Settings, World};
use divvy_telemetry::{MetricsRegistry, Readiness};
use kube::Client;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::task::TaskTracker;

use crate::app::config::Config;
use crate::app::parts::{Latest, executor, host_edits};
use crate::app::ready::{ReadinessWatch, Ready};
use crate::app::supervise::Tasks;
use crate::caps::cap::Capper;
use crate::caps::hook_words::HookWords;
use crate::caps::serve::Limits;
use crate::claims::api::KubeClaims;
use crate::claims::fetch::{ClaimFetcher, Connect};
use crate::claims::service::{ClaimService, ClaimWork};
use crate::host::edits::HostEdits;
use crate::metrics::Metrics;
use crate::node::facts::{Fact, Facts, GpusSeen, NodeFacts, PodsOfClaims, Registered, Used};
use crate::node::{Brain, Followed, Outlets};
use crate::sinks::debug::Debug;
use crate::sinks::events::Events;
use crate::sinks::gpu_node;
use crate::sinks::notifier::Notifier;
use crate::sinks::publisher::Publishing;
use crate::sinks::slices::SlicesSink;
use crate::sinks::usage::UsageSink;
use crate::sources::disk::DiskSource;
use crate::sources::gpu_time::GpuTime;
use crate::sources::health::{HealthFile, HealthOwner};
use crate::sources::holders::HoldersSource;
use crate::sources::inventory::InventoryOwner;
use crate::sources::mps_supervisor::SupervisorWatch;
use crate::sources::neighbours::Neighbours;
use crate::sources::node_labels;
use crate::sources::nvidia_plugin::NvidiaPlugin;
use crate::sources::policies::{PolicyWatch, PolicyWiring};
use crate::sources::records::RecordsSource;
use crate::sources::usage::UsageSource;
use crate::upkeep::cdi_files::{CdiFiles, Due};
use crate::upkeep::drain;
use crate::upkeep::granted::Granted;
use crate::upkeep::leaving::Leaving;
use crate::upkeep::lingering::Lingering;
use crate::upkeep::publisher_lock::PublisherLock;
use crate::upkeep::rounds::Rounds;

use crate::upkeep::{Keeper, Reporter};

/// The parts that the plugin needs from outside; the demo and tests put a fake API server and
/// simulated GPUs here.
pub struct Deps {
    /// The API server.
    pub client: kube::Client,
    /// The settings for connections of the threads that prepare claims; without it they share
    /// `client`.
    pub kube: Option<kube::Config>,
    /// The GPUs. May answer with errors for as long as the driver is not there.
    pub gpus: Arc<dyn GpuDriver>,
    /// MPS servers, in place of the supervisor's of `--mps-dir`.
    pub mps: Option<Arc<dyn MpsServers>>,
    /// Where metrics are registered.
    pub metrics: MetricsRegistry,
    pub readiness: Readiness,
}

/// The ends that are written: one writer each.
#[derive(Default)]
pub(crate) struct Senders {
    seen: watch::Sender<GpusSeen>,
    node: watch::Sender<Option<Arc<NodeFacts>>>,
    pub(crate) registered: watch::Sender<Registered>,
    in_charge: watch::Sender<bool>,
    pub(crate) nvidia_serves: watch::Sender<bool>,
    pool: watch::Sender<Option<Arc<Pool>>>,
    status: watch::Sender<PublishStatus>,
    used: watch::Sender<Arc<Used>>,
    outlets: Outlets,
}

/// The ends that are followed.
#[derive(Clone)]
pub(crate) struct Channels {
    /// The GPUs as the driver lists them.
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// The node's object.
    node: watch::Receiver<Option<Arc<NodeFacts>>>,
    /// The state of the registration with the kubelet.
    registered: watch::Receiver<Registered>,
    /// True while this instance publishes and reconciles.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// True while NVIDIA's plugin serves the node, in whose place divvy stands.
    pub(crate) nvidia_serves: watch::Receiver<bool>,
    /// The pool for the publisher.
    pool: watch::Receiver<Option<Arc<Pool>>>,
    /// The result of publishing it.
    status: watch::Receiver<PublishStatus>,
    /// The outputs of the brain.
    pub(crate) followed: Followed,
    /// To the brain.
    facts: Facts,
    /// Asks for the GPUs to be read again.
    refresh: Arc<Notify>,
    /// Records have changed.
    changed: Arc<Notify>,
    /// A claim was unprepared and lingers.
    lingers: Arc<Notify>,
    /// Another grant of a GPU is on disk.
    granted: Arc<Notify>,
    /// A record could not be written.
    unwritten: Arc<Notify>,
    /// The GpuNode was made anew.
    new_node: Arc<Notify>,
}

impl Senders {
    /// The other ends, and what ends at the brain.
    pub(crate) fn follow(&self) -> (Channels, mpsc::UnboundedReceiver<Fact>) {
        let (facts, brain) = mpsc::unbounded_channel();
        let channels = Channels {
            seen: self.seen.subscribe(),
            node: self.node.subscribe(),
            registered: self.registered.subscribe(),
            in_charge: self.in_charge.subscribe(),
            nvidia_serves: self.nvidia_serves.subscribe(),
            pool: self.pool.subscribe(),
            status: self.status.subscribe(),
            followed: self.outlets.follow(),
            facts,
            refresh: Arc::default(),
            changed: Arc::default(),
            lingers: Arc::default(),
            granted: Arc::default(),
            unwritten: Arc::default(),
            new_node: Arc::default(),
        };
        (channels, brain)
    }
}

/// The parts that several tasks work with.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) service: Arc<ClaimService>,
    pub(crate) channels: Channels,
    client: Client,
    clock: ServerClock,
    gpus: Arc<dyn GpuDriver>,
    host: HostRoot,
    edits: Arc<HostEdits>,
    executor: Arc<Executor>,
    notifier: Arc<Notifier>,
    /// Work that goes on after an answer or a decision: Events.
    reports: TaskTracker,
    metrics: Metrics,
}

impl Shared {
    /// Opens the files, and makes the executor and the service of claims. Nothing runs yet.
    pub(crate) fn new(config: Config, deps: Deps, channels: Channels) -> anyhow::Result<Self> {
        let Deps {
            client,
            kube,
            gpus,
            mps,
            metrics,
            ..
        } = deps;
        // Wrapped before it is cloned: no part that shares it can wait for ever. The threads that
        // read claims have clients of their own, and time each read.
        let clock = ServerClock::default();
        let client = with_deadline(client, config.timing.answer, clock.clone());
        let metrics = Metrics::new(&metrics);
        let host = HostRoot::under(&config.host_root);
        let edits = Arc::new(host_edits(&config, &host)?);
        let connect = kube.map_or_else(
            || Connect::Shared(client.clone()),
            |config| Connect::Own(Box::new(config)),
        );
        let fetcher = Arc::new(ClaimFetcher::new(connect, config.timing.answer));
        // The executor reads the GPUs that the inventory has seen last.
        let (seen, refresh) = (channels.seen.clone(), channels.refresh.clone());
        let latest = Arc::new(Latest::new(seen, gpus.clone(), refresh));
        let claims = Arc::new(KubeClaims {
            fetcher: fetcher.clone(),
            client: client.clone(),
            driver: config.driver_name.clone(),
            node: config.node_name.clone(),
            pool: config.pool(),
            runtime: tokio::runtime::Handle::current(),
            numbers_lost: metrics.numbers_lost.clone(),
        });
        let executor = Arc::new(executor(
            &config,
            &host,
            (&gpus, mps),
            edits.clone(),
            claims.clone(),
            latest,
        )?);
        let notifier = Arc::new(Notifier::new(
            client.clone(),
            &config.driver_name,
            &config.node_name,
        ));
        let reports = TaskTracker::new();
        let service = Arc::new(ClaimService::new(ClaimWork {
            driver: config.driver_name.clone(),
            pool: claims.pool.clone(),
            nvidia_serves: channels.nvidia_serves.clone(),
            executor: executor.clone(),
            fetcher,
            clock: clock.clone(),
            notifier: notifier.clone(),
            metrics: metrics.clone(),
            budget: config.timing.call,
            changed: channels.changed.clone(),
            lingers: channels.lingers.clone(),
            unwritten: channels.unwritten.clone(),
            facts: channels.facts.clone(),
            refresh: channels.refresh.clone(),
            after: reports.clone(),
        }));
        Ok(Self {
            config,
            claims,
            service,
            channels,
            client,
            clock,
            gpus,
            host,
            edits,
            executor,
            notifier,
            reports,
            metrics,
        })
    }

    /// Starts all tasks but the keeper, which has something to do first.
    pub(crate) fn add_tasks(
        &self,
        tasks: &mut Tasks,
        senders: Senders,
        facts: mpsc::UnboundedReceiver<Fact>,
        nvidia: NvidiaPlugin,
        ready: &Ready,
    ) -> Keeper {
        let Senders {
            seen,
            node,
            registered: _,
            in_charge,
            nvidia_serves,
            pool,
            status,
            used,
            outlets,
        } = senders;
        // Sources feed the brain, and sinks follow it; each sender goes to the one task that writes
        // it.
        self.add_gpu_sources(tasks, seen);
        let (held, holds) = watch::channel(None);
        self.add_api_sources(tasks, node, held);
        let gpu_time = GpuTime {
            executor: self.executor.clone(),
            seen: self.channels.seen.clone(),
            used: used.subscribe(),
            in_charge: self.channels.in_charge.clone(),
            held: holds,
            file: self.config.plugin_dir.join("gpu-time.json"),
            metrics: self.metrics.gpu_time.clone(),
        };
        tasks.add("the sums of GPU time", gpu_time.run(tasks.stop.clone()));
        self.add_brain(tasks, outlets, facts);
        self.add_sinks(tasks, pool, status, ready.slices.clone());
        // The rounds of reconcile know which pods the kubelet lists; the reports of use need them.
        let (listed, of_claims) = watch::channel(Arc::default());
        if let Some(idle_after) = self.config.idle_after {
            self.add_usage(tasks, used, of_claims, idle_after);
        }
        tasks.add("the caps of memory", self.limits().run(tasks.stop.clone()));
        let every = self.config.timing.nvidia_plugin;
        let nvidia = nvidia.run(
            nvidia_serves,
            self.channels.facts.clone(),
            every,
            tasks.stop.clone(),
        );
        tasks.add("the watch for NVIDIA's plugin", nvidia);
        let lock = PublisherLock::new(&self.config.plugin_dir);
        let poll = self.config.timing.publisher_poll;
        let registered = self.channels.registered.clone();
        tasks.add(
            "the publisher lock",
            lock.run(registered.clone(), in_charge, poll, tasks.stop.clone()),
        );
        let readiness = ReadinessWatch {
            inventory: ready.inventory.clone(),
            registration: ready.registered.clone(),
            metrics: self.metrics.clone(),
            seen: self.channels.seen.clone(),
            registered,
            publishes: self.channels.in_charge.clone(),
        };
        tasks.add("the readiness watch", readiness.run(tasks.stop.clone()));
        self.keeper(listed, ready)
    }

    /// The server of the hook, with the caps of memory.
    fn limits(&self) -> Limits {
        let config = &self.config;
        let capper = Capper::new(
            self.executor.clone(),
            self.gpus.clone(),
            self.host.clone(),
            config.cgroup_root.clone(),
            &config.own_run_dir().join("caps"),
        );
        Limits {
            capper: Arc::new(capper),
            socket: config.hook_socket(),
            wanted: config.memory_caps,
            metrics: self.metrics.clone(),
            every: config.timing.caps,
            in_charge: self.channels.in_charge.clone(),
            seen: self.channels.seen.clone(),
            words: self.edits.calls_hook().then(|| {
                let (executor, host) = (self.executor.clone(), self.host.clone());
                Arc::new(HookWords::new(executor, host, self.notifier.clone()))
            }),
            notifier: self.notifier.clone(),
            reports: self.reports.clone(),
        }
    }

    fn add_gpu_sources(&self, tasks: &mut Tasks, seen: watch::Sender<GpusSeen>) {
        let Channels {
            facts,
            refresh,
            node,
            ..
        } = self.channels.clone();
        let (holds, works) = (self.executor.clone(), self.service.clone());
        let inventory = InventoryOwner {
            gpus: self.gpus.clone(),
            host: self.host.clone(),
            timing: self.config.timing,
            seen,
            facts: facts.clone(),
            refresh,
            edits: self.edits.clone(),
            cgroups: self.config.cgroup_root.clone(),
            memory_caps: self.config.memory_caps,
            mps: crate::app::parts::supervisor(&self.config),
            node,
            release_file: drain::file_in(&self.config.plugin_dir),
            in_use: Arc::new(move || {
                // Calls before records: work that ends in between has written its record by then.
                // Records that cannot be read count as use.
                works.running() > 0 || holds.held().map_or(true, |held| !held.is_empty())
            }),
            notifier: self.notifier.clone(),
            reports: self.reports.clone(),
        };
        tasks.add("the inventory", inventory.run(tasks.stop.clone()));
        let health = HealthOwner {
            gpus: self.gpus.clone(),
            executor: self.executor.clone(),
            rules: self.config.health.clone(),
            timing: self.config.timing,
            seen: self.channels.seen.clone(),
            facts: facts.clone(),
            metrics: self.metrics.clone(),
            file: Arc::new(HealthFile::new(
                &self.config.plugin_dir,
                self.executor.boot().clone(),
            )),
            new_node: self.channels.new_node.clone(),
        };
        tasks.add("the health watch", health.run(tasks.stop.clone()));
        let neighbours = Neighbours {
            gpus: self.gpus.clone(),
            executor: self.executor.clone(),
            claims: self.claims.clone(),
            config: self.config.clone(),
            seen: self.channels.seen.clone(),
            publishes: self.channels.in_charge.clone(),
            facts,
        };
        tasks.add(
            "the watch for neighbours",
            neighbours.run(tasks.stop.clone()),
        );
    }

    fn add_api_sources(
        &self,
        tasks: &mut Tasks,
        node: watch::Sender<Option<Arc<NodeFacts>>>,
        held: watch::Sender<Option<Arc<Vec<HeldDevice>>>>,
    ) {
        let Channels {
            facts,
            changed,
            seen,
            ..
        } = self.channels.clone();
        let name = self.config.node_name.clone();
        tasks.add(
            "the node watch",
            node_labels::run(self.client.clone(), name, node, tasks.stop.clone()),
        );
        let policies = PolicyWatch::new(PolicyWiring {
            client: self.client.clone(),
            config: &self.config,
            nodes: self.channels.node.clone(),
            facts: facts.clone(),
            notifier: self.notifier.clone(),
            reports: self.reports.clone(),
            metrics: self.metrics.clone(),
        });
        tasks.add("the policy watch", policies.run(tasks.stop.clone()));
        let works = self.service.clone();
        let records = RecordsSource {
            executor: self.executor.clone(),
            busy: Arc::new(move || works.busy()),
            seen,
            forget: self.channels.followed.forget.clone(),
            changed,
            held,
            facts: facts.clone(),
            timing: self.config.timing,
        };
        tasks.add("the reader of records", records.run(tasks.stop.clone()));
        let disk = DiskSource {
            folder: self.config.plugin_dir.join("claims"),
            failed: self.channels.unwritten.clone(),
            retry: self.config.timing.driver_retry,
            facts: facts.clone(),
        };
        tasks.add("the watch on the disk", disk.run(tasks.stop.clone()));
        let supervisor = SupervisorWatch {
            folder: self.config.mps_dir.clone(),
            every: self.config.timing.mps,
            facts: facts.clone(),
        };
        tasks.add(
            "the watch on the MPS supervisor",
            supervisor.run(tasks.stop.clone()),
        );
        let asked = self.channels.followed.ask.clone();
        let holders = HoldersSource {
            claims: self.claims.clone(),
            asked,
            facts,
        };
        tasks.add("the lister of holders", holders.run(tasks.stop.clone()));
    }

    fn add_brain(&self, tasks: &mut Tasks, out: Outlets, facts: mpsc::UnboundedReceiver<Fact>) {
        let timing = &self.config.timing;
        let settings = Settings {
            node: self.config.node_name.clone(),
            rules: self.config.gpu_rules(),
            mode_lock: self.config.mode_lock,
            neighbours_first: self.config.naming().stands_in(),
            leave: timing.leave,
            ask_again: timing.withdrawn,
            retry: timing.driver_retry,
        };
        let brain = Brain {
            world: World::new(settings),
            facts,
            out,
            events: Events {
                executor: self.executor.clone(),
                fetcher: self.claims.fetcher.clone(),
                notifier: self.notifier.clone(),
                tasks: self.reports.clone(),
                in_charge: self.channels.in_charge.clone(),
                known: None,
            },
            metrics: self.metrics.clone(),
        };
        tasks.add("the brain", brain.run(tasks.stop.clone()));
    }

    fn add_sinks(
        &self,
        tasks: &mut Tasks,
        pool: watch::Sender<Option<Arc<Pool>>>,
        status: watch::Sender<PublishStatus>,
        ready: divvy_telemetry::ReadyHandle,
    ) {
        let Channels {
            in_charge,
            registered,
            facts,
            granted,
            ..
        } = self.channels.clone();
        let (config, timing) = (&self.config, &self.config.timing);
        let slices = SlicesSink {
            offer: self.channels.followed.offer.clone(),
            executor: self.executor.clone(),
            pool,
            retry: timing.driver_retry,
            granted,
            facts: facts.clone(),
        };
        tasks.add("the grants and the pool", slices.run(tasks.stop.clone()));
        let publisher = Publishing {
            client: self.client.clone(),
            config: PublisherConfig {
                driver: config.driver_name.clone(),
                node_name: config.node_name.clone(),
            },
            clock: self.clock.clone(),
            desired: self.channels.pool.clone(),
            publishes: in_charge.clone(),
            registered,
            nvidia_serves: self.channels.nvidia_serves.clone(),
            facts,
            status,
            ready,
            metrics: self.metrics.clone(),
        };
        tasks.add("the publisher", publisher.run(tasks.stop.clone()));
        let writer = gpu_node::Writer {
            target: self.gpu_node(),
            reports: self.channels.followed.report.clone(),
            publishes: in_charge,
            every: timing.gpu_node,
            look: timing.gpu_node_look,
            retry: timing.policy_retry,
            made: self.channels.new_node.clone(),
        };
        tasks.add("the GpuNode", writer.run(tasks.stop.clone()));
    }

    fn add_usage(
        &self,
        tasks: &mut Tasks,
        used: watch::Sender<Arc<Used>>,
        listed: watch::Receiver<Arc<PodsOfClaims>>,
        idle_after: Duration,
    ) {
        let sink = UsageSink {
            used: used.subscribe(),
            listed,
            resolved: self.channels.followed.resolved.clone(),
            publishes: self.channels.in_charge.clone(),
            idle_after,
            confirm: self.config.timing.usage_confirm,
            metrics: self.metrics.usage.clone(),
            executor: self.executor.clone(),
            claims: self.claims.clone(),
            notifier: self.notifier.clone(),
            reports: self.reports.clone(),
        };
        let source = UsageSource {
            gpus: self.gpus.clone(),
            executor: self.executor.clone(),
            host: self.host.clone(),
            node: self.config.node_name.clone(),
            timing: self.config.timing,
            seen: self.channels.seen.clone(),
            publishes: self.channels.in_charge.clone(),
            used,
            seconds: self.metrics.usage.read_seconds.clone(),
        };
        tasks.add("the reader of use", source.run(tasks.stop.clone()));
        tasks.add("the reports of use", sink.run(tasks.stop.clone()));
    }

    fn keeper(&self, listed: watch::Sender<Arc<PodsOfClaims>>, ready: &Ready) -> Keeper {
        let Channels {
            seen,
            registered,
            in_charge,
            changed,
            lingers,
            granted,
            nvidia_serves,
            ..
        } = self.channels.clone();
        let (timing, reporter) = (
            self.config.timing,
            Reporter::new(
                changed,
                self.metrics.clone(),
                (self.notifier.clone(), self.reports.clone()),
            ),
        );
        Keeper {
            files: CdiFiles {
                executor: self.executor.clone(),
                edits: self.edits.clone(),
                folder: self.config.cdi_dir.clone(),
                timing,
                seen,
                holdings: self.channels.followed.holdings.clone(),
                reporter: reporter.clone(),
                due: Due::default(),
            },
            lingering: Lingering {
                executor: self.executor.clone(),
                every: timing.reconcile_busy,
                lingers,
                reporter: reporter.clone(),
            },
            rounds: Rounds {
                executor: self.executor.clone(),
                claims: self.claims.clone(),
                config: self.config.clone(),
                registered,
                nvidia_serves,
                publishes: in_charge,
                listed,
                notifier: self.notifier.clone(),
                metrics: self.metrics.clone(),
                records: ready.records.clone(),
                reporter: reporter.clone(),
            },
            granted: Granted {
                executor: self.executor.clone(),
                retry: timing.reconcile_busy,
                mps: self.config.mps_dir.as_ref().map(|_| timing.mps),
                stored: granted,
                seen: self.channels.seen.clone(),
                reporter,
            },
        }
    }

    /// The end of the plugin on a node that is no longer its own.
    pub(crate) fn leaving(&self) -> Leaving {
        Leaving {
            client: self.client.clone(),
            node: self.config.node_name.clone(),
            driver: self.config.driver_name.clone(),
            selector: self.config.node_selector.clone(),
            last: self.channels.node.borrow().clone(),
            executor: self.executor.clone(),
            reported: self.channels.followed.report.borrow().clone(),
            target: self.gpu_node(),
        }
    }

    fn gpu_node(&self) -> gpu_node::Target {
        gpu_node::Target {
            client: self.client.clone(),
            node: self.config.node_name.clone(),
            driver: self.config.driver_name.clone(),
        }
    }

    /// The debug page.
    pub(crate) fn debug(&self) -> Debug {
        let Channels {
            seen,
            registered,
            in_charge,
            status,
            ..
        } = self.channels.clone();
        Debug {
            config: self.config.clone(),
            executor: self.executor.clone(),
            seen,
            registered,
            publishes: in_charge,
            published: status,
            state: self.channels.followed.state.clone(),
            service: self.service.clone(),
        }
    }
}

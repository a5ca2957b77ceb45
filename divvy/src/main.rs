//! `divvy`: what the project does, on the command line. Data on standard output, talk on standard
//! error. Under the name `kubectl-divvy` the same program is a plugin of kubectl.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use divvy_cli::format::Format;
#[cfg(not(feature = "demo"))]
use divvy_cli::inventory::Args as Inventory;
use divvy_cli::{
    Usage, bundle, claim, complete, convert, defrag, explain, format, status, top, ui,
};
#[cfg(feature = "demo")]
use divvy_demo::inventory::SimArgs as Inventory;

/// Whole GPUs, MIG partitions and shares on Kubernetes, from the same cards.
///
/// Exit status: 0 all well; 1 something failed or stays pending (it says what and why); 2 wrong
/// arguments; 3 (status only) the cluster was read, and something needs action.
#[derive(Debug, Parser)]
#[command(
    name = "divvy",
    version,
    after_help = "Examples:
  divvy demo
  divvy claim gpu | divvy demo -f -
  divvy status pod NAMESPACE/POD
  divvy convert -f pod.yaml

Environment:
  DIVVY_DOCS_URL  URL of the documentation: pages such as docs/policy.md are shown as links"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the whole driver at work without a cluster and without a GPU
    #[command(after_help = "Examples:
  divvy demo
  divvy demo -f pod.yaml --sim a100-80x8
  divvy demo -f FOLDER -f examples/all-modes.yaml --sim h100x4,l4x2
  divvy claim share --memory 10Gi | divvy demo -f - -f examples/all-modes.yaml")]
    #[cfg(feature = "demo")]
    Demo(divvy_demo::Args),
    /// Show the GPUs of this machine, or of a simulated one, and what divvy would publish
    #[command(after_help = "Examples:
  divvy inventory
  divvy inventory --sim a100-80x2 --mig-on 0
  divvy inventory --sim h100x8,l4x2 --offer everything -o wide
  divvy inventory --sim h100x2 --policy policy.yaml --node-label pool=train")]
    Inventory(Inventory),
    /// Print the ResourceSlices that a node of a kind will publish, for autoscalers
    ///
    /// Without what is only of one node: UUIDs, taints. Exit status 1: the compared node would not
    /// be taken for ready, or the format has no words for the template.
    #[command(after_help = "Examples:
  divvy slices --sim h100x8
  divvy slices --sim h100x8 --policy policy.yaml -o karpenter --instance-type p5.48xlarge
  divvy slices --node NODE
  divvy slices --diff NODE")]
    #[cfg(feature = "demo")]
    Slices(divvy_demo::slices::Args),
    /// Show the GPUs of a cluster, who holds them, what is stuck since when and why, and what to do
    #[command(after_help = "Examples:
  divvy status
  divvy status pod NAMESPACE/POD
  divvy status gpu NODE/gpu-0
  divvy status policy
  divvy status -n NAMESPACE -o json")]
    Status(status::Args),
    /// Show which claims hold GPUs and what they really use, the most wasteful first
    #[command(after_help = "Examples:
  divvy top
  divvy top gpus -o wide
  divvy top claims -n NAMESPACE
  divvy top namespaces --since 7d --prometheus http://localhost:9090")]
    Top(top::Args),
    /// Show the fleet, live, on a page in the browser; nothing is deployed
    #[command(after_help = "Examples:
  divvy ui
  divvy ui --context prod-eu
  divvy demo --ui")]
    Ui(ui::Args),
    /// Print a claim template, and a pod that uses it, for what is asked for in words
    #[command(after_help = "Examples:
  divvy claim gpu --count 2 --same nvlink
  divvy claim mig --profile 1g.10gb
  divvy claim share --memory 10Gi --cores 10 | kubectl apply -f -
  divvy claim share --percent 50 | divvy demo -f - -f examples/by-percent.yaml")]
    Claim(claim::Args),
    /// Rewrite manifests for the device plugin, HAMi, KAI, gpu-manager or NVIDIA's DRA driver
    ///
    /// The result is on standard output; what has no counterpart is noted on standard error, and in
    /// comments before each object. Exit status 1: a part could not be converted, and is as it was;
    /// 2: the input cannot be read.
    #[command(after_help = "Examples:
  divvy convert -f pod.yaml | kubectl apply -f -
  divvy convert -f FOLDER > converted.yaml
  kubectl get deployments -o yaml | divvy convert -f -
  divvy convert -f pod.yaml | divvy demo -f - -f examples/all-modes.yaml")]
    Convert(convert::Args),
    /// Collect what a report of a fault needs into one archive, without secrets
    ///
    /// Answers of divvy status, GpuNodes, policies, slices, classes, claims, divvy's pods with
    /// their logs and Events. Kinds that you may not read are named. Nothing is sent.
    #[command(after_help = "Examples:
  divvy bundle
  divvy bundle -o FOLDER --log-lines 500")]
    Bundle(bundle::Args),
    /// Plan which pods to evict so that another one fits: the fewest and least important
    ///
    /// Exit status 1: no eviction that is allowed makes room, or the evictions were stopped.
    #[command(after_help = "Examples:
  divvy defrag --plan --pod NAMESPACE/POD
  divvy defrag --apply --pod NAMESPACE/POD
  divvy defrag --plan --want '8*gpu' --priority 100
  divvy defrag --plan --want mig:3g.40gb --objects cluster.yaml -o json")]
    Defrag(defrag::Args),
    /// Explain why a pod waits, and what would make it fit: less, another form, or the end of a pod
    ///
    /// Exit status 1: there is no such way.
    #[command(after_help = "Examples:
  divvy explain NAMESPACE/POD
  divvy explain --want mig:3g.40gb
  divvy explain NAMESPACE/POD --objects cluster.yaml -o json")]
    Explain(explain::Args),
    /// Run a workload on a simulated fleet: what is accepted, what waits and why, what is stranded
    #[command(after_help = "Examples:
  divvy simulate --sim '40*h100x8,10*l40sx4' --generate notebooks=2000 --policy examples/all-modes.yaml
  divvy simulate --sim '40*h100x8' --trace trace.csv --policy a.yaml --policy b.yaml
  divvy simulate --sim '40*h100x8' --sim '38*h100x8' -f FOLDER -o json
  divvy simulate --context prod-eu --trace trace.jsonl -o html > run.html")]
    #[cfg(feature = "demo")]
    Simulate(divvy_demo::simulate::Args),
    /// Judge manifests before they are applied, by what a simulated fleet or a cluster publishes
    ///
    /// Expressions that do not compile or cost more than the API server allows, names that no
    /// device has, classes and claims that nothing satisfies, configs. Exit status: 0 nothing to
    /// say; 1 errors; 2 wrong arguments, or the manifests cannot be read; 3 warnings alone.
    #[command(after_help = "Examples:
  divvy validate -f FOLDER --sim '40*h100x8,10*l40sx4'
  divvy validate -f claim.yaml -f examples/all-modes.yaml --sim h100x8 -o json
  divvy validate -f claim.yaml --context prod-eu")]
    #[cfg(feature = "demo")]
    Validate(divvy_demo::validate::Args),
    /// Print a completion script: source <(divvy completion bash)
    Completion {
        /// The shell that completes
        shell: clap_complete::Shell,
    },
    /// Write manual pages into a folder, one for each command: man -l FOLDER/divvy.1
    #[command(after_help = "Examples:
  divvy man ~/.local/share/man/man1")]
    Man {
        /// The folder, which is made where it is not there
        folder: PathBuf,
    },
    /// Print the version, the commit, and which Kubernetes it is for
    Version {
        /// Output format
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
}

/// Facts about this program that a report of a fault has.
#[derive(Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct About {
    version: &'static str,
    /// Commit of the sources, or `unknown`.
    commit: &'static str,
    /// Oldest version of Kubernetes.
    kubernetes: &'static str,
    /// True if `divvy demo` is in it.
    demo: bool,
    /// Architecture and system.
    platform: String,
}

impl About {
    fn own() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("DIVVY_COMMIT"),
            kubernetes: "1.34",
            demo: cfg!(feature = "demo"),
            platform: format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }

    fn text(&self) -> String {
        format!(
            "divvy {}, commit {}, for Kubernetes {} and later",
            self.version, self.commit, self.kubernetes
        )
    }
}

/// Returns the command. Without the demo its examples are left out, too.
fn command() -> clap::Command {
    let command = Args::command();
    if cfg!(feature = "demo") {
        command
    } else {
        without_demo(command)
    }
}

/// Leaves out the examples that need the demo, or the GPUs that it simulates.
fn without_demo(command: clap::Command) -> clap::Command {
    let after = command.get_after_help().map(ToString::to_string);
    let command = match after {
        Some(text) => {
            let needs = |line: &&str| !line.contains("divvy demo") && !line.contains("--sim");
            let kept: Vec<&str> = text.lines().filter(needs).collect();
            command.after_help(kept.join("\n"))
        }
        None => command,
    };
    command.mut_subcommands(without_demo)
}

/// Returns the name of the program in its usage: as the user calls it.
fn called(program: Option<&OsStr>) -> &'static str {
    let name = program.map(Path::new).and_then(Path::file_stem);
    if name == Some(OsStr::new("kubectl-divvy")) {
        "kubectl divvy"
    } else {
        "divvy"
    }
}

/// The arguments; clap ends the process for `--help` and for what it does not understand.
fn arguments() -> Args {
    let name = called(std::env::args_os().next().as_deref());
    let matches = command().bin_name(name).get_matches();
    Args::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn main() -> ExitCode {
    // Two providers in one build make kube panic: ours is chosen before anything else. A second
    // choice is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut words: Vec<String> = std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if is_completion(words.first()) {
        return completed(&words.split_off(1));
    }
    let result = match arguments().command {
        #[cfg(feature = "demo")]
        Command::Demo(args) => divvy_demo::run(&args),
        #[cfg(feature = "demo")]
        Command::Inventory(args) => divvy_demo::inventory::run(&args),
        #[cfg(not(feature = "demo"))]
        Command::Inventory(args) => divvy_cli::inventory::run(&args, ""),
        #[cfg(feature = "demo")]
        Command::Slices(args) => divvy_demo::slices::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Ui(args) => ui::run(&args),
        Command::Bundle(args) => bundle::run(&args, &About::own().text()),
        Command::Claim(args) => claim::run(&args),
        Command::Convert(args) => convert::run(&args),
        #[cfg(feature = "demo")]
        Command::Simulate(args) => divvy_demo::simulate::run(&args),
        #[cfg(feature = "demo")]
        Command::Validate(args) => divvy_demo::validate::run(&args),
        Command::Defrag(args) => defrag::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Completion { shell } => completion(shell),
        Command::Man { folder } => man(&folder),
        Command::Version { output } => {
            format::show(&About::own(), output, About::text).map(|()| ExitCode::SUCCESS)
        }
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            format::talk(&format!(
                "divvy: {}",
                divvy_telemetry::Chain(error.as_ref())
            ));
            if error.is::<Usage>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Says whether kubectl calls the program for completions of its plugin.
fn is_completion(program: Option<&String>) -> bool {
    let name = program.and_then(|program| Path::new(program).file_stem());
    name == Some(OsStr::new("kubectl_complete-divvy"))
}

/// Answers kubectl: the words that can come next. Whatever fails, there are fewer of them.
fn completed(words: &[String]) -> ExitCode {
    let found = complete::candidates(&command(), words);
    let names = found.names.map(|of| complete::names(of, words));
    let last = words.last().map_or("", String::as_str);
    let text = complete::answer(&found, &names.unwrap_or_default(), last);
    match format::print(&text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Writes a manual page for each command.
fn man(folder: &Path) -> anyhow::Result<ExitCode> {
    fs_err::create_dir_all(folder)?;
    clap_mangen::generate_to(command(), folder)?;
    Ok(ExitCode::SUCCESS)
}

fn completion(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "divvy", &mut script);
    format::print(String::from_utf8_lossy(&script).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::CommandFactory as _;

    #[test]
    fn usage_calls_the_program_as_its_user_does() {
        let called = |name: &str| super::called(Some(OsStr::new(name)));
        assert_eq!(called("/usr/local/bin/kubectl-divvy"), "kubectl divvy");
        assert_eq!(called("kubectl-divvy.exe"), "kubectl divvy");
        assert_eq!(called("target/release/divvy"), "divvy");
        assert_eq!(super::called(None), "divvy");
    }

    #[test]
    fn kubectl_is_answered_under_the_name_that_it_calls() {
        for (program, expected) in [
            ("/usr/local/bin/kubectl_complete-divvy", true),
            ("kubectl_complete-divvy.exe", true),
            ("kubectl-divvy", false),
            ("divvy", false),
        ] {
            assert_eq!(super::is_completion(Some(&program.to_owned())), expected);
        }
    }

    #[test]
    fn without_the_demo_no_help_names_it() {
        fn lines(command: &clap::Command, all: &mut Vec<String>) {
            let help = command.clone().render_long_help().to_string();
            all.extend(help.lines().map(str::to_owned));
            let inner = command.get_subcommands();
            for inner in inner.filter(|inner| inner.get_name() != "demo") {
                lines(inner, all);
            }
        }
        let mut all = Vec::new();
        lines(&super::without_demo(super::Args::command()), &mut all);
        let of_command = |line: &&String| !line.trim_start().starts_with("demo ");
        let named: Vec<&String> = all
            .iter()
            .filter(of_command)
            .filter(|line| line.contains("demo"))
            .collect();
        assert_eq!(named, Vec::<&String>::new());
        assert!(all.iter().any(|line| line.contains("divvy status pod")));
    }

    #[test]
    fn each_command_has_a_manual_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        super::man(folder.path()).unwrap();
        let page = |name: &str| fs_err::read_to_string(folder.path().join(name)).unwrap();
        assert!(page("divvy.1").contains("divvy\\-status(1)"));
        assert!(page("divvy-status-pod.1").contains("divvy\\-status\\-pod"));
        assert!(page("divvy-claim-share.1").contains("\\-\\-memory"));
    }

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
    /// `cargo xtask reference` runs this with `DIVVY_BLESS=1`.
    #[test]
    fn reference_has_the_help_of_every_command() {
        let mut page = "<!-- Written by `cargo xtask reference`. -->\n\n# The command `divvy`\n\n\
            Under the name `kubectl-divvy` it is a plugin of kubectl: `kubectl divvy status`.\n"
            .to_owned();
        let mut root = super::Args::command().term_width(80);
        root.build();
        add_help(&root, "", &mut page);
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/cli.md");
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(file, &page).unwrap();
        }
        assert_eq!(
            fs_err::read_to_string(file).unwrap(),
            page,
            "run `cargo xtask reference`"
        );
    }

    /// The help of a command and of those below it, but for clap's own.
    fn add_help(command: &clap::Command, above: &str, page: &mut String) {
        let name = format!("{above}{}", command.get_name());
        let help = command
            .clone()
            .term_width(80)
            .render_long_help()
            .to_string();
        let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
        *page += &format!("\n## {name}\n\n```text\n{}\n```\n", lines.join("\n"));
        for inner in command
            .get_subcommands()
            .filter(|inner| inner.get_name() != "help")
        {
            add_help(inner, &format!("{name} "), page);
        }
    }
}

//! Every command that the README, the runbooks, the examples and the other pages print: its flags,
//! files, values and labels exist, and it is run by a test or listed with a reason in `table.rs`.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

mod example;
mod shell;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use example::Example;
use table::{How, TABLE};

/// Programs of the platforms and of the node, whose arguments are not checked.
const OTHERS: &[&str] = &[
    "skopeo",
    "eksctl",
    "gcloud",
    "oc",
    "nvkind",
    "kind",
    "systemctl",
    "nvidia-smi",
    "fuser",
    "touch",
    "rm",
    "lsmod",
    "grep",
    "dmesg",
    "tail",
    "curl",
    "cat",
    "ps",
    "ln",
    "hostname",
    "sed",
    "sudo",
];

/// Flags of kubectl that take no value, and those that do, by command.
const KUBECTL: &[(&str, &[&str], &[&str])] = &[
    ("annotate", &["--overwrite"], &[]),
    ("api-resources", &[], &["--api-group"]),
    ("apply", &[], &["-f"]),
    (
        "create",
        &[],
        &[
            "--verb",
            "--resource",
            "--role",
            "--group",
            "--clusterrole",
            "--serviceaccount",
        ],
    ),
    (
        "delete",
        &["--ignore-not-found"],
        &["-f", "--selector", "--field-selector"],
    ),
    ("describe", &[], &["-l"]),
    (
        "drain",
        &["--ignore-daemonsets", "--delete-emptydir-data"],
        &[],
    ),
    ("exec", &["--"], &[]),
    (
        "run",
        &["--rm", "--stdin", "--tty", "--command"],
        &["--restart", "--image", "--overrides"],
    ),
    ("get", &[], &["-o", "-l", "--selector", "--field-selector"]),
    ("label", &["--overwrite", "--all"], &[]),
    ("logs", &["--prefix"], &["--since", "-l", "-c"]),
    ("patch", &[], &["--type", "--patch"]),
    ("port-forward", &[], &[]),
    ("rollout", &[], &[]),
    ("uncordon", &[], &[]),
    ("version", &[], &[]),
    (
        "wait",
        &[],
        &["--for", "--timeout", "--selector", "--field-selector"],
    ),
];

/// Flags of helm likewise.
const HELM: (&[&str], &[&str]) = (
    &[
        "--reuse-values",
        "--reset-then-reuse-values",
        "--take-ownership",
    ],
    &["--namespace", "--set", "--values"],
);

const CHART: &str = "deploy/chart/divvy";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A document, with the files that its commands name: blocks of YAML that begin with `# NAME.yaml`.
struct Page {
    name: String,
    text: String,
    files: BTreeMap<String, String>,
    /// The example whose README it is.
    example: Option<Example>,
}

impl Page {
    fn read(path: &Path) -> Self {
        let text = fs_err::read_to_string(path).unwrap();
        let files = text
            .split("```yaml\n# ")
            .skip(1)
            .filter_map(|block| {
                let (name, content) = block.split_once('\n')?;
                let (content, _) = content.split_once("```")?;
                Some((name.to_owned(), content.to_owned()))
            })
            .collect();
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        let example = name
            .strip_prefix("examples/")
            .and_then(|rest| rest.strip_suffix("/README.md"))
            .map(|folder| {
                let manifests = path.with_file_name("manifests.yaml");
                Example::new(folder, &fs_err::read_to_string(manifests).unwrap())
            });
        Self {
            name,
            text,
            files,
            example,
        }
    }

    /// A folder in which its commands can be run: with its files and the examples.
    fn folder(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in &self.files {
            fs_err::write(folder.path().join(name), content).unwrap();
        }
        let examples = fs_err::canonicalize(root().join("examples")).unwrap();
        fs_err::os::unix::fs::symlink(examples, folder.path().join("examples")).unwrap();
        folder
    }

    /// Returns whether a file that a command names is there; words in capitals stand for the
    /// user's.
    fn has(&self, file: &str) -> bool {
        let placeholder = file.chars().all(|c| c.is_ascii_uppercase());
        placeholder || file == "-" || self.files.contains_key(file) || root().join(file).exists()
    }
}

/// Every page of the repository, but for those of `docs/` that are generated.
fn pages() -> Vec<Page> {
    let mut found: Vec<PathBuf> = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
        .iter()
        .map(|page| root().join(page))
        .collect();
    let mut folders: Vec<PathBuf> = ["docs", "examples", CHART, "tests/hardware"]
        .iter()
        .map(|folder| root().join(folder))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("docs/reference") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found.iter().map(|path| Page::read(path)).collect()
}

fn divvy() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command.env("KUBECONFIG", "/nonexistent/kubeconfig");
    command
}

/// Runs a command of divvy that needs no cluster; of the others only the arguments are tried.
fn ours(words: &[String], page: &Page) -> Result<(), String> {
    let folder = page.folder();
    let first = words.first().map(String::as_str).unwrap_or_default();
    let serves = first == "ui" || words.iter().any(|word| word == "--ui");
    // All examples are played by other tests.
    let long = *words == ["demo"];
    let mut command = divvy();
    command.current_dir(folder.path());
    command.args(words.iter().map(|word| {
        if word == "FILE" {
            "examples/one-gpu"
        } else {
            word
        }
    }));
    if serves || long {
        command.arg("--help");
    }
    let done = command.output().map_err(|error| error.to_string())?;
    // Without a cluster these end with 1; wrong arguments would be 2.
    let of_cluster = |word: &String| ["--node", "--diff"].contains(&word.as_str());
    // A page shows what is said of a file that is wrong.
    let is_wrong = words.iter().any(|word| word == "wrong.yaml");
    let needs_cluster = ["status", "top"].contains(&first)
        || words.iter().any(of_cluster)
        || (["defrag", "explain"].contains(&first)
            && !words.iter().any(|word| word == "--objects"));
    let expected = i32::from(is_wrong || needs_cluster);
    if done.status.code() == Some(expected) {
        return Ok(());
    }
    Err(format!(
        "{}: {}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    ))
}

/// Flags with their values, and the other arguments.
type Split<'a> = (Vec<(&'a str, &'a str)>, Vec<&'a str>);

/// Splits arguments into flags with their values and the rest; a flag that is in neither list is an
/// error.
fn flags<'a>(words: &'a [String], plain: &[&str], valued: &[&str]) -> Result<Split<'a>, String> {
    let (mut given, mut rest) = (Vec::new(), Vec::new());
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let (flag, value) = word
            .split_once('=')
            .map_or((word, None), |(flag, value)| (flag, Some(value)));
        if word == "--" {
            break;
        } else if !word.starts_with('-') {
            rest.push(word);
        } else if valued.contains(&flag) {
            let value = value
                .or_else(|| words.next())
                .ok_or_else(|| format!("{flag} needs a value"))?;
            given.push((flag, value));
        } else if !plain.contains(&flag) {
            return Err(format!(
                "{flag} is in no list of divvy/tests/documents/main.rs"
            ));
        }
    }
    Ok((given, rest))
}

fn kubectl(words: &[String], page: &Page) -> Result<(), String> {
    let namespace = ["-n", "--namespace"];
    let at = match words {
        [first, ..] if namespace.contains(&first.as_str()) => 2,
        _ => 0,
    };
    let words = words.get(at..).unwrap_or_default();
    let [verb, arguments @ ..] = words else {
        return Err("no command".to_owned());
    };
    if verb == "divvy" {
        return ours(arguments, page);
    }
    let (_, plain, valued) = KUBECTL
        .iter()
        .find(|(name, ..)| name == verb)
        .ok_or_else(|| format!("kubectl {verb} is in no list of divvy/tests/documents/main.rs"))?;
    let plain: Vec<&str> = plain
        .iter()
        .copied()
        .chain(["-A", "--all-namespaces"])
        .collect();
    let valued: Vec<&str> = valued.iter().copied().chain(namespace).collect();
    let (given, rest) = flags(arguments, &plain, &valued)?;
    for (flag, value) in given {
        let right = match flag {
            "-f" => page.has(value),
            "-l" | "--selector" => {
                let component = value.strip_prefix("app.kubernetes.io/component=");
                matches!(component, Some("node" | "mps-supervisor")) || page.example.is_some()
            }
            "--field-selector" => {
                value == "spec.nodeName=NODE" || value.starts_with("spec.driver=gpu.divvy.dev")
            }
            _ => true,
        };
        if !right {
            return Err(format!("{flag} {value}: does not exist"));
        }
    }
    let daemon_set = |word: &&&str| word.starts_with("daemonset/divvy");
    match rest.iter().find(daemon_set) {
        Some(other) if *other != "daemonset/divvy-node" => {
            Err(format!("{other}: the chart has daemonset/divvy-node"))
        }
        _ => Ok(()),
    }
}

fn helm(words: &[String], page: &Page) -> Result<(), String> {
    let (given, rest) = flags(words, HELM.0, HELM.1)?;
    if !["install", "rollback", "upgrade", "uninstall"].contains(rest.first().unwrap_or(&"")) {
        return Err(format!(
            "helm {rest:?} is in no list of divvy/tests/documents/main.rs"
        ));
    }
    let values = fs_err::read_to_string(root().join(CHART).join("values.yaml")).unwrap();
    let values: serde_json::Value = serde_saphyr::from_str(&values).unwrap();
    for (flag, value) in given {
        let key = value.split('=').next().unwrap_or_default();
        let pointer = format!("/{}", key.replace('.', "/"));
        if flag == "--set" && rest.contains(&CHART) && values.pointer(&pointer).is_none() {
            return Err(format!("{key} is no value of the chart"));
        }
        // The values of a platform are on its page, those of the first pages on that of the
        // platform.
        if flag == "--values" && value != "values.yaml" && !page.has(value) {
            return Err(format!("{value}: does not exist"));
        }
    }
    Ok(())
}

fn cargo(words: &[String], page: &Page) -> Result<(), String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["run", "-p", "divvy", "--", rest @ ..] => ours(
            &rest
                .iter()
                .map(|word| (*word).to_owned())
                .collect::<Vec<_>>(),
            page,
        ),
        ["install", "--path", folder] | ["install", "--path", folder, "--locked"]
            if page.has(folder) =>
        {
            Ok(())
        }
        ["xtask", "cluster", "exec", rest @ ..] => check(
            &rest
                .iter()
                .map(|word| (*word).to_owned())
                .collect::<Vec<_>>(),
            page,
        ),
        ["xtask", command, ..] => xtask(command),
        ["test", "--workspace"] | ["build", "--release", "-p", "divvy-hardware", ..] => Ok(()),
        _ => Err("is in no list of divvy/tests/documents/main.rs".to_owned()),
    }
}

/// Checks that xtask has a command.
fn xtask(command: &str) -> Result<(), String> {
    let source = fs_err::read_to_string(root().join("xtask/src/main.rs")).unwrap();
    let (_, commands) = source.split_once("enum Command {").unwrap();
    let (commands, _) = commands.split_once("\n}\n").unwrap();
    commands
        .lines()
        .map(|line| line.trim().trim_end_matches(',').to_lowercase())
        .any(|variant| variant == command || variant.starts_with(&format!("{command}(")))
        .then_some(())
        .ok_or_else(|| format!("xtask has no command {command}"))
}

fn check(words: &[String], page: &Page) -> Result<(), String> {
    let [program, arguments @ ..] = words else {
        return Ok(());
    };
    match program.as_str() {
        "divvy" => ours(arguments, page),
        "kubectl" => kubectl(arguments, page),
        "helm" => helm(arguments, page),
        "cargo" => cargo(arguments, page),
        other if OTHERS.contains(&other) => Ok(()),
        other => Err(format!(
            "{other} is in no list of divvy/tests/documents/main.rs"
        )),
    }
}

/// Runs a line of pipes and redirections in a shell that finds divvy.
fn piped(line: &str, page: &Page) -> Result<(), String> {
    let folder = page.folder();
    let program = Path::new(env!("CARGO_BIN_EXE_divvy"));
    let mut command = Command::new("sh");
    command.current_dir(folder.path());
    command.args(["-euc", &line.replace("FOLDER", "examples/one-gpu")]);
    let path = std::env::var("PATH").unwrap_or_default();
    let ours = program.parent().unwrap_or(program).display();
    command.env("PATH", format!("{ours}:{path}"));
    let done = command.output().map_err(|error| error.to_string())?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(format!("{}: {said}", done.status))
}

/// Commands of divvy that need no cluster and end by themselves are run by [`ours`].
fn is_run_here(line: &str) -> bool {
    [
        "divvy demo ",
        "divvy inventory ",
        "divvy claim ",
        "divvy convert ",
        "divvy slices --sim ",
        "divvy simulate ",
        "divvy validate ",
    ]
    .iter()
    .any(|start| line.starts_with(start))
        && !line.contains("--ui")
}

#[test]
fn every_command_of_the_documents_is_right_and_tried_or_has_a_reason() {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    let mut done = BTreeSet::new();
    for page in pages() {
        for line in shell::lines(&page.text) {
            let place = format!("{}:{}: {}", page.name, line.number, line.text);
            let plain: Vec<&str> = line.text.split(' ').collect();
            let of_example = page.example.as_ref().and_then(|it| it.how(&plain));
            if let Some(Err(why)) = &of_example {
                wrong.push(format!("{place}\n  {why}"));
            }
            let is_known = of_example.is_some()
                || is_run_here(&line.text)
                || TABLE.iter().any(|(command, _)| *command == line.text);
            if !is_known {
                wrong.push(format!(
                    "{place}\n  is neither run nor in divvy/tests/documents/table.rs"
                ));
            }
            if is_run_here(&line.text) && line.text.contains(['|', '>']) {
                if let Err(why) = piped(&line.text, &page) {
                    wrong.push(format!("{place}\n  {why}"));
                }
                seen.insert(line.text);
                continue;
            }
            for words in shell::commands(&line.text) {
                // A command that is on several pages is run once, unless the page has files for it.
                if page.files.is_empty() && !done.insert(words.clone()) {
                    continue;
                }
                if let Err(why) = check(&words, &page) {
                    wrong.push(format!("{place}\n  {why}"));
                }
            }
            seen.insert(line.text);
        }
    }
    assert!(seen.len() > 220, "only {} commands are found", seen.len());
    let stale = TABLE.iter().filter(|(command, _)| !seen.contains(*command));
    wrong.extend(stale.map(|(command, _)| format!("table.rs: no document has {command}")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_readme_shows_the_columns_of_gpunodes() {
    let definition = root().join(CHART).join("files/crds/gpunodes.yaml");
    let definition: serde_json::Value =
        serde_saphyr::from_str(&fs_err::read_to_string(definition).unwrap()).unwrap();
    let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array();
    let shown: Vec<String> = columns
        .unwrap()
        .iter()
        .filter(|column| column["priority"].as_u64().unwrap_or(0) == 0)
        .map(|column| column["name"].as_str().unwrap().to_uppercase())
        .collect();
    let readme = fs_err::read_to_string(root().join("README.md")).unwrap();
    let (_, after) = readme
        .split_once("\nkubectl get gpunodes\n# NAME ")
        .unwrap();
    let head: Vec<&str> = after.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, shown);
}

#[test]
fn the_first_pod_of_the_readme_gets_a_gpu_in_the_demo() {
    let page = Page::read(&root().join("README.md"));
    let folder = page.folder();
    let done = divvy()
        .current_dir(folder.path())
        .args(["demo", "-f", "pod.yaml"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("gpu-"), "{said}");
}

/// A reason that names a test holds while there is that test.
#[test]
fn tests_that_stand_for_commands_exist() {
    let mut sources = String::new();
    let mut folders: Vec<PathBuf> = [
        "cli/src",
        "demo/src",
        "divvy/src",
        "kubelet-plugin/tests",
        "tests/e2e/src/cases",
        "xtask/src",
    ]
    .iter()
    .map(|folder| root().join(folder))
    .collect();
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources += &fs_err::read_to_string(path).unwrap();
            }
        }
    }
    let cases = TABLE
        .iter()
        .filter(|(_, how)| matches!(how, How::Cluster(_)))
        .count();
    assert!(cases > 30 && sources.contains("\"the_commands_of_the_readme_work\""));
    for (command, how) in TABLE {
        match how {
            How::By(test) => assert!(
                sources.contains(&format!("\"{test}\""))
                    || sources.contains(&format!("fn {test}(")),
                "{command}: there is no test {test}"
            ),
            How::Cluster(expected) => assert!(!expected.contains('\n'), "{command}"),
            How::No(reason) => assert!(!reason.is_empty(), "{command}"),
        }
    }
}

/// Mistakes of these kinds were in documents once, or could be: the first test finds each.
#[test]
fn mistakes_in_commands_are_found() {
    let page = Page {
        name: String::new(),
        text: String::new(),
        files: BTreeMap::new(),
        example: None,
    };
    for (line, why) in [
        (
            "kubectl logs daemonset/divvy-node --field-selector spec.nodeName=NODE",
            "--field-selector",
        ),
        (
            "kubectl apply -f examples/gone/manifests.yaml",
            "does not exist",
        ),
        ("kubectl get pods -l app=divvy", "does not exist"),
        (
            "kubectl -n divvy rollout status daemonset/divvy",
            "daemonset/divvy-node",
        ),
        ("kubectl explode", "kubectl explode"),
        (
            "helm install divvy deploy/chart/divvy --set image.repo=x",
            "image.repo",
        ),
        ("divvy status pods x", "unrecognized subcommand"),
        ("kubectl divvy status --fleet", "unexpected argument"),
        ("divvy inventory --sim h999x1", "h999"),
        ("docker run x", "docker"),
        ("cargo xtask explode", "explode"),
        (
            "cargo xtask cluster exec kubectl explode",
            "kubectl explode",
        ),
    ] {
        let found = shell::commands(line)
            .iter()
            .find_map(|words| check(words, &page).err());
        let found = found.unwrap_or_default();
        assert!(found.contains(why), "{line}: {found:?}");
    }
}

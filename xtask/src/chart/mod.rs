//! `cargo xtask chart`: what the chart makes of many sets of values, checked with helm alone: no
//! cluster.

mod cluster;
mod golden;
mod made;
mod notes;
mod refused;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use divvy_e2e::parts;
use serde_json::Value;

/// Something that must be true of what was rendered. Objects are named `Kind/name`, fields by JSON
/// pointers.
#[derive(Debug, Clone, Copy)]
enum Expected {
    There(&'static str),
    Absent(&'static str),
    /// The field has this JSON value.
    Is(&'static str, &'static str, &'static str),
    /// The field is a text that contains this.
    Says(&'static str, &'static str, &'static str),
}

/// Cases of both lists, all with their flags.
fn all<E: Copy>(
    plain: &'static [(&'static str, E)],
    flagged: &'static [(&'static str, &'static [&'static str], E)],
) -> Vec<(&'static str, &'static [&'static str], E)> {
    let plain = plain
        .iter()
        .map(|(values, expected)| (*values, &[][..], *expected));
    plain.chain(flagged.iter().copied()).collect()
}

/// Runs every check; the first that fails is the error.
pub(crate) fn run(root: &Path) -> Result<()> {
    let helm = Helm {
        program: parts::helm()?,
        chart: root.join("deploy/chart/divvy"),
    };
    helm.run(&["lint", "--strict"], "{}")?;
    golden::check(root, &helm)?;
    let (made, refused) = (
        all(made::CASES, made::FLAGGED),
        all(refused::CASES, refused::FLAGGED),
    );
    for (values, flags, expected) in &made {
        let check = || {
            ensure!(!expected.is_empty(), "nothing is expected");
            let objects = objects(&helm.template(values, flags)?)?;
            consistent(&objects)?;
            expected.iter().try_for_each(|one| met(*one, &objects))
        };
        check().with_context(|| format!("values {values:?} {flags:?}"))?;
    }
    for (values, flags, why) in &refused {
        let said = helm
            .template(values, flags)
            .err()
            .map(|error| format!("{error:#}"));
        ensure!(
            said.as_ref().is_some_and(|text| text.contains(why)),
            "values {values:?} {flags:?} must be refused with {why:?}, but: {said:?}"
        );
    }
    reserved_variables(&helm)?;
    known_variables(root)?;
    cluster::check(&helm)?;
    notes::check(&helm)?;
    let snippets = snippets(root)?;
    for (place, values) in &snippets {
        objects(&helm.template(values, &[])?)
            .and_then(|o| consistent(&o))
            .with_context(|| place.clone())?;
    }
    crate::say(&format!(
        "chart: {} golden renders, {} more sets of values rendered, {} refused, {} snippets of documents: fine",
        golden::CASES.len(),
        made.len(),
        refused.len(),
        snippets.len()
    ));
    Ok(())
}

struct Helm {
    program: PathBuf,
    chart: PathBuf,
}

impl Helm {
    fn template(&self, values: &str, flags: &[&str]) -> Result<String> {
        self.run(
            &[
                &["template", "--name-template=divvy", "--namespace=gpus"],
                flags,
            ]
            .concat(),
            values,
        )
    }

    /// Runs helm with these values. The image counts as preloaded unless they say otherwise.
    fn run(&self, args: &[&str], values: &str) -> Result<String> {
        let [preloaded, file] = ["preloaded", "values"].map(|name| {
            std::env::temp_dir().join(format!("divvy-{name}-{}.yaml", std::process::id()))
        });
        fs_err::write(&preloaded, "image: {preloaded: true}")?;
        fs_err::write(&file, values)?;
        let out = Command::new(&self.program)
            .args(args)
            .arg(&self.chart)
            .arg("--values")
            .arg(&preloaded)
            .arg("--values")
            .arg(&file)
            // A developer's own cluster is left alone.
            .env("KUBECONFIG", "/dev/null")
            .output();
        fs_err::remove_file(&preloaded)?;
        fs_err::remove_file(&file)?;
        let out = out.context("helm cannot be started")?;
        if !out.status.success() {
            bail!(
                "helm: {}{}",
                String::from_utf8_lossy(&out.stdout),
                String::from_utf8_lossy(&out.stderr)
            );
        }
        Ok(String::from_utf8(out.stdout)?)
    }
}

/// Reads the objects; a key that is there twice is an error.
fn objects(yaml: &str) -> Result<Vec<Value>> {
    let all: Vec<Value> =
        serde_saphyr::from_multiple(yaml).context("what helm printed is not YAML")?;
    Ok(all.into_iter().filter(|object| !object.is_null()).collect())
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Names an object by kind and name; claim templates, which are in namespaces of users, by these,
/// too.
fn name(object: &Value) -> String {
    let (kind, name) = (text(object, "/kind"), text(object, "/metadata/name"));
    if kind == "ResourceClaimTemplate" {
        format!("{kind}/{}/{name}", text(object, "/metadata/namespace"))
    } else {
        format!("{kind}/{name}")
    }
}

const COMPONENT: &str = "/metadata/labels/app.kubernetes.io~1component";

/// Returns the account of an object's pods, of a job's too; empty where it has none.
fn account(object: &Value) -> &str {
    let of = |way: &str| {
        text(
            object,
            &format!("/spec{way}/template/spec/serviceAccountName"),
        )
    };
    match of("") {
        "" => of("/jobTemplate/spec"),
        own => own,
    }
}

/// Returns the account of a component's pods.
fn account_of<'a>(objects: &'a [Value], component: &str) -> Result<&'a str> {
    let is_it = |object: &Value| text(object, COMPONENT) == component;
    let found = find(objects, |object| {
        is_it(object) && !account(object).is_empty()
    })?;
    Ok(account(found))
}

/// Fails unless each rule of an admission policy says something whatever it meets: without
/// `message`, the API server shows the rule itself where its `messageExpression` has no valid
/// result.
fn messages(name: &str, object: &Value) -> Result<()> {
    let rules = object
        .pointer("/spec/validations")
        .and_then(Value::as_array);
    for rule in rules.into_iter().flatten() {
        ensure!(
            !text(rule, "/message").is_empty(),
            "{name} has a rule without message: {}",
            text(rule, "/expression")
        );
    }
    Ok(())
}

/// Checks the rules for every set of values: names, labels, accounts.
fn consistent(objects: &[Value]) -> Result<()> {
    let mut seen = BTreeSet::new();
    let daemon_set = find(objects, |object| text(object, "/kind") == "DaemonSet")?;
    for object in objects {
        let name = name(object);
        ensure!(seen.insert(name.clone()), "{name} is made twice");
        for label in ["name", "instance", "version", "managed-by", "part-of"] {
            let pointer = format!("/metadata/labels/app.kubernetes.io~1{label}");
            ensure!(
                !text(object, &pointer).is_empty(),
                "{name} has no label app.kubernetes.io/{label}"
            );
        }
        for subject in object
            .pointer("/subjects")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let wanted = account_of(objects, text(object, COMPONENT))?;
            ensure!(
                text(subject, "/name") == wanted,
                "{name} is for another account than {wanted}"
            );
        }
        let policy = text(object, "/spec/matchConditions/0/expression");
        if policy.contains("userInfo") {
            let account = account_of(objects, text(object, COMPONENT))?;
            let user = format!("'system:serviceaccount:gpus:{account}'");
            ensure!(
                policy.contains(&user),
                "{name} is about another account than {account}: {policy}"
            );
        }
        messages(&name, object)?;
    }
    let labels = daemon_set
        .pointer("/spec/template/metadata/labels")
        .context("pods without labels")?;
    for (key, value) in daemon_set
        .pointer("/spec/selector/matchLabels")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        ensure!(
            labels.get(key) == Some(value),
            "the DaemonSet does not select its own pods by {key}"
        );
    }
    Ok(())
}

fn find(objects: &[Value], which: impl Fn(&Value) -> bool) -> Result<&Value> {
    objects
        .iter()
        .find(|object| which(object))
        .context("no such object")
}

fn met(expected: Expected, objects: &[Value]) -> Result<()> {
    let there = |wanted: &str| {
        find(objects, |object| name(object) == wanted).with_context(|| {
            format!(
                "{wanted}; there are {}",
                objects.iter().map(name).collect::<Vec<_>>().join(", ")
            )
        })
    };
    match expected {
        Expected::There(wanted) => there(wanted).map(drop)?,
        Expected::Absent(unwanted) => {
            ensure!(
                objects.iter().all(|object| name(object) != unwanted),
                "{unwanted} is made"
            );
        }
        Expected::Is(object, pointer, json) => {
            let found = there(object)?.pointer(pointer);
            let wanted: Value = serde_json::from_str(json).with_context(|| json.to_owned())?;
            ensure!(
                found == Some(&wanted),
                "{object} {pointer} is {found:?}, not {wanted}"
            );
        }
        Expected::Says(object, pointer, part) => {
            let found = text(there(object)?, pointer);
            ensure!(
                found.contains(part),
                "{object} {pointer} is {found:?}, without {part:?}"
            );
        }
    }
    Ok(())
}

/// Checks that every variable of the chart is refused in `extraEnv`, where the last of two would
/// win.
fn reserved_variables(helm: &Helm) -> Result<()> {
    let all = "{driverRoot: /opt/driver, nvmlLibrary: /opt/driver/libnvidia-ml.so.1}";
    let objects = objects(&helm.template(all, &[])?)?;
    let daemon_set = find(&objects, |object| text(object, "/kind") == "DaemonSet")?;
    let env = daemon_set
        .pointer("/spec/template/spec/containers/0/env")
        .and_then(Value::as_array);
    for variable in env.context("no variables")? {
        let name = text(variable, "/name");
        let said = helm
            .template(&format!("extraEnv: [{{name: {name}, value: x}}]"), &[])
            .err();
        let said = said.map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(
            said.contains(&format!("extraEnv must not set {name}")),
            "extraEnv may set {name}: {said}"
        );
    }
    Ok(())
}

/// Templates that start programs, each with the source of the program's settings.
const PROGRAMS: [(&str, &str); 3] = [
    ("daemonset.yaml", "kubelet-plugin/src/app/args.rs"),
    ("clustercontroller.yaml", "controller/cluster/src/args.rs"),
    ("mps.yaml", "mps-supervisor/src/main.rs"),
];
/// Variables that libraries and NVIDIA's runtime read.
const OF_OTHERS: [&str; 2] = ["MALLOC_ARENA_MAX", "NVIDIA_VISIBLE_DEVICES"];

/// Checks that the programs read every variable of the chart: one that a program does not know
/// would be ignored without a word, since its settings have no prefix of their own.
fn known_variables(root: &Path) -> Result<()> {
    for (template, source) in PROGRAMS {
        let templates = root.join("deploy/chart/divvy/templates");
        let text = fs_err::read_to_string(templates.join(template))?;
        let settings = fs_err::read_to_string(root.join(source))?;
        let names = text.lines().filter_map(|line| {
            let (name, _) = line
                .trim()
                .strip_prefix("- {name: ")?
                .split_once(", value")?;
            Some(name)
        });
        let mut any = false;
        for name in names.filter(|name| !OF_OTHERS.contains(name)) {
            any = true;
            ensure!(
                settings.contains(&format!("env = \"{name}\"")),
                "{template} sets {name}, which no flag of {source} reads"
            );
        }
        ensure!(any, "{template} has no variables");
    }
    Ok(())
}

/// Values in documents: fenced blocks whose first line is `# values.yaml`, with their place.
fn snippets(root: &Path) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for file in crate::sources::files(root, "*.md")? {
        let text = fs_err::read_to_string(root.join(&file))?;
        let blocks = blocks(&text)
            .into_iter()
            .filter(|(_, block)| block.starts_with("# values.yaml\n"));
        found.extend(blocks.map(|(line, yaml)| (format!("{file}:{line}"), yaml)));
    }
    Ok(found)
}

/// Returns the fenced blocks of a document without their indentation, each with its line.
fn blocks(document: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut lines = document.lines().enumerate();
    while let Some((number, fence)) = lines.next() {
        let text = fence.trim_start();
        if text.starts_with("```") {
            let indent = fence.len() - text.len();
            let inside = lines
                .by_ref()
                .map(|(_, line)| line.get(indent..).unwrap_or(line));
            let block: Vec<&str> = inside.take_while(|line| !line.starts_with("```")).collect();
            found.push((number + 1, block.join("\n") + "\n"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{all, blocks, made, refused};

    #[test]
    fn blocks_are_found_with_their_lines_and_without_their_indentation() {
        let text = "a\n```yaml\nkind: Pod\n```\n1. x\n   ```yaml\n   a:\n     b: c\n   ```\nd\n";
        assert_eq!(
            blocks(text),
            [
                (2, "kind: Pod\n".to_owned()),
                (6, "a:\n  b: c\n".to_owned())
            ]
        );
    }

    /// Users paste them.
    #[test]
    fn every_policy_in_the_documents_is_read() {
        let mut policies = 0;
        let root = crate::root();
        for folder in ["docs", "docs/install", "docs/migrate", "docs/runbooks"] {
            for entry in fs_err::read_dir(root.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|extension| extension != "md") {
                    continue;
                }
                for (line, yaml) in blocks(&fs_err::read_to_string(&path).unwrap()) {
                    if yaml.contains("kind: GpuPolicy\n") {
                        let read: Vec<serde_json::Value> =
                            serde_saphyr::from_multiple(&yaml).unwrap();
                        for policy in read.iter().filter(|object| object["kind"] == "GpuPolicy") {
                            let decoded = divvy_api::policy::decode_policy(policy);
                            assert!(
                                decoded.is_ok(),
                                "{}:{line}: {:?}",
                                path.display(),
                                decoded.err()
                            );
                            policies += 1;
                        }
                    }
                }
            }
        }
        assert!(policies > 3, "only {policies} policies are found");
    }

    #[test]
    fn no_set_of_values_is_tried_twice() {
        let made = all(made::CASES, made::FLAGGED)
            .into_iter()
            .map(|case| (case.0, case.1));
        let refused = all(refused::CASES, refused::FLAGGED)
            .into_iter()
            .map(|case| (case.0, case.1));
        let mut all: Vec<_> = made.chain(refused).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}

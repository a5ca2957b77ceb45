//! A Prometheus on the node that scrapes the node plugin, and the queries of dashboards.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fs_err as fs;
use serde_json::{Value, json};

use crate::api::at;
use crate::case::PATIENCE;
use crate::cluster::Cluster;
use crate::config::{Layout, program};
use crate::parts;
use crate::process::{Daemon, Signal, say};
use crate::wait::poll;

const PORT: u16 = 9090;

/// A Prometheus that runs until this is dropped.
#[derive(Debug)]
pub struct Prometheus<'a> {
    cluster: &'a Cluster,
    folder: PathBuf,
}

impl<'a> Prometheus<'a> {
    /// Starts one that scrapes `target` (an address and a port) every second, with these groups of
    /// rules.
    pub fn start(cluster: &'a Cluster, target: &str, groups: &Value) -> Result<Self> {
        let program = parts::prometheus()?;
        let this = Self {
            cluster,
            folder: cluster.state().join("prometheus"),
        };
        fs::create_dir_all(&this.folder)?;
        let file = |name: &str| this.folder.join(name).display().to_string();
        // As the chart's PodMonitor has it: the labels of a series are kept, and the target has its
        // node's name.
        let job = json!({
            "job_name": "divvy", "honor_labels": true,
            "static_configs": [{"targets": [target], "labels": {"node": Layout::NODE}}],
        });
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [file("rules.yaml")],
            "scrape_configs": [job],
        });
        // JSON is YAML.
        fs::write(file("config.yaml"), config.to_string())?;
        fs::write(file("rules.yaml"), json!({"groups": groups}).to_string())?;
        check(&file("rules.yaml"))?;
        let args = [
            program.display().to_string(),
            format!("--config.file={}", file("config.yaml")),
            format!("--storage.tsdb.path={}", file("data")),
            format!("--web.listen-address=0.0.0.0:{PORT}"),
        ];
        this.daemon().define(&args, &[])?;
        this.daemon().start()?;
        poll("a ready Prometheus", PATIENCE, || {
            ensure!(
                this.daemon().is_running(),
                "Prometheus has ended\n{}",
                this.daemon().log_tail()
            );
            cluster.api().text(&path("-/ready")).map(|_| true)
        })?;
        Ok(this)
    }

    /// The series that a query gives now.
    pub fn query(&self, query: &str) -> Result<Vec<Value>> {
        let answer = self
            .get(&format!("query?query={}", encoded(query)))
            .with_context(|| query.to_owned())?;
        let series = at(&answer, "data.result").as_array().cloned();
        series.with_context(|| format!("{query}: no series, but {answer}"))
    }

    /// The number that a query gives for the one series that it is about.
    pub fn number(&self, query: &str) -> Result<Option<f64>> {
        let series = self.query(query)?;
        ensure!(series.len() < 2, "{query}: {} series", series.len());
        Ok(series
            .first()
            .and_then(|series| at(series, "value.1").as_str()?.parse().ok()))
    }

    /// Returns the answer of Prometheus' own API at `alerts`, `rules`, …
    pub fn get(&self, what: &str) -> Result<Value> {
        let answer = self.cluster.api().get(&path(&format!("api/v1/{what}")))?;
        answer.with_context(|| format!("Prometheus has no {what}"))
    }

    fn daemon(&self) -> Daemon<'a> {
        self.cluster.daemon("prometheus")
    }
}

/// Has Prometheus' own tool check a file of rules: it names the rule where the server ends with an
/// error, and refuses rules that are there twice.
fn check(rules: &str) -> Result<()> {
    let Some(promtool) = promtool()? else {
        say(
            "there is no promtool, and Debian's cannot be had: the rules are checked by Prometheus alone",
        );
        return Ok(());
    };
    let mut command = Command::new(promtool);
    let done = command
        .args(["check", "rules", "--lint=all", "--lint-fatal", rules])
        .output()?;
    let said = [done.stdout, done.stderr].concat();
    ensure!(
        done.status.success(),
        "promtool refuses the rules: {}",
        String::from_utf8_lossy(&said)
    );
    Ok(())
}

/// Returns the program of this machine, or that of Debian's package, which is not installed.
fn promtool() -> Result<Option<PathBuf>> {
    if let Some(found) = program("promtool") {
        return Ok(Some(found));
    }
    let folder = parts::cache_dir()?.join("promtool");
    let found = folder.join("root/usr/bin/promtool");
    if found.exists() {
        return Ok(Some(found));
    }
    fs::create_dir_all(&folder)?;
    let script = "apt-get -q download prometheus && dpkg-deb -x prometheus_*.deb root && rm prometheus_*.deb";
    let fetched = Command::new("sh")
        .args(["-ec", script])
        .current_dir(&folder)
        .output();
    let is_there = fetched.is_ok_and(|done| done.status.success()) && found.exists();
    Ok(is_there.then_some(found))
}

impl Drop for Prometheus<'_> {
    fn drop(&mut self) {
        let ended = self
            .daemon()
            .stop(Signal::Term)
            .and_then(|()| Ok(fs::remove_dir_all(&self.folder)?));
        if let Err(error) = ended {
            say(&format!("Prometheus is not entirely gone: {error:#}"));
        }
    }
}

/// The API server reaches any port of a node.
fn path(path: &str) -> String {
    format!("/api/v1/nodes/{}:{PORT}/proxy/{path}", Layout::NODE)
}

fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// Title and expression of each query of a dashboard; those of its variables as what lists their
/// values.
pub fn queries(dashboard: &Value) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let list = |value: &Value, path: &str| at(value, path).as_array().cloned().unwrap_or_default();
    let text = |value: &Value, path: &str| -> Result<String> {
        Ok(at(value, path)
            .as_str()
            .with_context(|| format!("no {path} in {value}"))?
            .to_owned())
    };
    for variable in list(dashboard, "templating.list")
        .iter()
        .filter(|one| at(one, "type") == "query")
    {
        let query = text(variable, "query")?;
        let inner = query
            .strip_prefix("label_values(")
            .and_then(|rest| rest.strip_suffix(')'));
        let (series, label) = inner
            .and_then(|inner| inner.rsplit_once(", "))
            .context(query.clone())?;
        found.push((
            text(variable, "label")?,
            format!("group by ({label}) ({series})"),
        ));
    }
    for panel in list(dashboard, "panels") {
        for target in list(&panel, "targets") {
            found.push((text(&panel, "title")?, text(&target, "expr")?));
        }
    }
    Ok(found)
}

/// The names in a text that metrics and recording rules of ours would have.
pub fn names(text: &str) -> BTreeSet<&str> {
    let other = |c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':';
    let ours =
        |word: &&str| word.starts_with("divvy_") || (word.contains(':') && word.contains("divvy"));
    text.split(other).filter(ours).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(path: &str) -> String {
        fs::read_to_string(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../..")
                .join(path),
        )
        .expect(path)
    }

    /// Every name that a query may have, from the list of metrics and the recording rules.
    fn known() -> BTreeSet<String> {
        let mut known = BTreeSet::new();
        for line in read("docs/metrics.md").lines() {
            let Some((name, rest)) = line
                .strip_prefix("| `")
                .and_then(|rest| rest.split_once("` | "))
            else {
                continue;
            };
            if rest.starts_with("histogram") {
                known.extend(["bucket", "sum", "count"].map(|suffix| format!("{name}_{suffix}")));
            } else {
                known.insert(name.to_owned());
            }
        }
        let rules = read("deploy/chart/divvy/files/divvy.rules.yaml");
        let recorded = rules
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- record: "));
        known.extend(recorded.map(str::to_owned));
        known
    }

    #[test]
    fn dashboards_and_rules_ask_only_for_metrics_that_the_list_has() {
        let folder = "deploy/chart/divvy/dashboards";
        let mut texts = vec![("rules".to_owned(), {
            let rules = read("deploy/chart/divvy/files/divvy.rules.yaml");
            let lines = rules
                .lines()
                .filter(|line| !line.trim_start().starts_with('#'));
            lines.collect::<Vec<_>>().join("\n")
        })];
        for name in ["fleet", "namespace", "claim"] {
            let dashboard: Value =
                serde_json::from_str(&read(&format!("{folder}/{name}.json"))).expect(name);
            let all = queries(&dashboard).expect(name);
            assert!(all.len() > 5, "{name} has only {} queries", all.len());
            texts.extend(
                all.into_iter()
                    .map(|(title, query)| (format!("{name}: {title}"), query)),
            );
            let own = at(&dashboard, "panels").as_array().expect(name).iter();
            let datasources = own.map(|panel| at(panel, "datasource.uid"));
            assert!(
                datasources.into_iter().all(|uid| uid == "${datasource}"),
                "{name} has a fixed data source"
            );
        }
        let known = known();
        for (place, text) in texts {
            let names = names(&text);
            let wrong: Vec<_> = names
                .iter()
                .filter(|name| !known.contains(**name))
                .collect();
            assert!(
                !names.is_empty() && wrong.is_empty(),
                "{place}: unknown {wrong:?} in {text}"
            );
        }
    }

    #[test]
    fn the_values_of_a_variable_are_a_query_too() {
        let variable =
            json!({"type": "query", "label": "Claim", "query": "label_values(a{b=\"c, d\"}, e)"});
        let found = queries(&json!({"templating": {"list": [variable]}})).expect("a query");
        let expected = "group by (e) (a{b=\"c, d\"})";
        assert_eq!(found, [("Claim".to_owned(), expected.to_owned())]);
        assert!(
            queries(&json!({"templating": {"list": [{"type": "query", "query": "x"}]}})).is_err()
        );
    }

    #[test]
    fn names_are_ours_and_whole() {
        let text =
            "sum(rate(divvy_claim_seconds_bucket{result=\"ok\"}[1m])) / ns:divvy_x:ratio + up";
        assert_eq!(
            names(text),
            BTreeSet::from(["divvy_claim_seconds_bucket", "ns:divvy_x:ratio"])
        );
        assert_eq!(encoded("a{b=\"c\"}"), "a%7Bb%3D%22c%22%7D");
    }
}

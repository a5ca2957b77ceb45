//! A Prometheus on the plugin's metrics, with the chart's rules, dashboards and the rule of an
//! adapter, while pods use what is scripted in [`super::usage`].

use super::usage::with_pods;
use super::{Context, Env, Result, Value, at, ensure, json, poll};
use crate::case::PATIENCE;
use crate::driver::rendered;
use crate::prometheus::{Prometheus, queries};

/// Panels and queries that have nothing to show here, by what they ask for: no pod has a whole GPU,
/// and no GPU has a fault.
const EMPTY: [&str; 2] = ["device=~\"gpu-[0-9]+\"", FAULTS];
/// Faults may be there all the same: a card that another case took out stays one for a while.
const FAULTS: &str = "divvy_gpu_ailment";

pub(in crate::cases) fn prometheus(env: &Env) -> Result<()> {
    with_pods(env, |env, _| {
        let rules = rendered(env.cluster, "prometheusrule.yaml", "prometheusRule.enabled")?;
        let mut groups = soon(at(
            rules.first().context("the chart made no rules")?,
            "spec.groups",
        ));
        let all = groups.as_array_mut().context("spec.groups is no list")?;
        all.push(stand_ins());
        let groups = &groups;
        let plugin = env.driver.wait_until_ready()?;
        let address = at(&plugin, "status.podIP")
            .as_str()
            .context("the plugin has no address")?;
        let prometheus = Prometheus::start(env.cluster, &format!("{address}:8080"), groups)?;
        rules_hold(env, &prometheus, groups)?;
        waiting_is_noticed(&prometheus)?;
        // When these have passed, every figure that a dashboard shows has been read.
        autoscalers_scale(env, &prometheus)?;
        dashboards_have_data(env, &prometheus)
    })
}

/// The same rules, whose alerts fire after a second and not after minutes.
fn soon(groups: &Value) -> Value {
    let mut groups = groups.clone();
    let all = groups
        .as_array_mut()
        .into_iter()
        .flatten()
        .filter_map(|group| group.get_mut("rules")?.as_array_mut());
    for wait in all.flatten().filter_map(|rule| rule.get_mut("for")) {
        *wait = "1s".into();
    }
    groups
}

/// Returns rules that record what kube-state-metrics and kube-controller-manager would say of a pod
/// that waits for a GPU, one that waits for a processor, and one that runs.
fn stand_ins() -> Value {
    let record = |name: &str, number: u32, labels: Value| json!({"record": name, "expr": format!("vector({number})"), "labels": labels});
    let waits = |pod: &str| {
        record(
            "kube_pod_status_unschedulable",
            1,
            json!({"namespace": "stand-in", "pod": pod}),
        )
    };
    let asks = |pod: &str, resource: &str| {
        record(
            "kube_pod_container_resource_requests",
            1,
            json!({"namespace": "stand-in", "pod": pod, "container": "main", "resource": resource}),
        )
    };
    let claims = |allocated: &str, number: u32| {
        record(
            "resourceclaim_controller_resource_claims",
            number,
            json!({"allocated": allocated, "admin_access": "false", "source": ""}),
        )
    };
    json!({"name": "stand-ins", "rules": [
        waits("waits"), waits("without-gpu"),
        asks("waits", "nvidia_com_mig_1g_10gb"), asks("without-gpu", "cpu"), asks("runs", "nvidia_com_gpu"),
        claims("false", 2), claims("true", 5),
    ]})
}

/// The alerts on metrics of other programs fire for what [`stand_ins`] has.
fn waiting_is_noticed(prometheus: &Prometheus) -> Result<()> {
    let firing = |name: &str| -> Result<Vec<String>> {
        let alerts = prometheus.get("alerts")?;
        let all = at(&alerts, "data.alerts").as_array().into_iter().flatten();
        let named =
            all.filter(|one| at(one, "labels.alertname") == name && at(one, "state") == "firing");
        Ok(named
            .map(|one| at(one, "annotations.summary").to_string())
            .collect())
    };
    for (name, said) in [
        ("DivvyPodWaits", "pod stand-in/waits has waited"),
        ("DivvyClaimsWait", "2 claim(s) of the cluster"),
    ] {
        poll(&format!("the alert {name}, once"), PATIENCE, || {
            let firing = firing(name)?;
            Ok(firing.len() == 1 && firing.iter().all(|summary| summary.contains(said)))
        })?;
    }
    Ok(())
}

/// The rules are those of the chart, every one can be evaluated, and they say what is scripted.
fn rules_hold(env: &Env, prometheus: &Prometheus, groups: &Value) -> Result<()> {
    let ratio = |pod: &str| {
        let labels = format!("namespace=\"{}\", claim=\"{pod}\"", env.namespace);
        prometheus.number(&format!(
            "namespace_claim:divvy_claim_memory_used:ratio{{{labels}}}"
        ))
    };
    // 12, 9 and 1 of 10 GiB; of one nothing is known.
    for (pod, expected) in [("over", 1.2), ("fine", 0.9), ("idle", 0.1)] {
        poll(
            &format!("ratio {expected} of claim {pod}"),
            PATIENCE,
            || Ok(ratio(pod)?.is_some_and(|found| (found - expected).abs() < 1e-6)),
        )?;
    }
    ensure!(
        ratio("dark")?.is_none(),
        "the ratio of a claim whose use is not known is {:?}",
        ratio("dark")?
    );

    // Shares of 10 GiB: what `divvy top namespaces --since` asks for, and a sum that grows.
    let time = format!(
        "increase(divvy_gpu_gib_seconds_granted_total{{namespace=\"{}\", form=\"time-sliced\"}}[10m])",
        env.namespace
    );
    poll("GPU time of the namespace", PATIENCE, || {
        Ok(prometheus
            .number(&format!("sum by (namespace) ({time})"))?
            .is_some_and(|sum| sum >= 10.0))
    })?;

    // The limit is an hour. With another one, the two GPUs that are held are found.
    let all = || {
        groups
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|group| at(group, "rules").as_array())
    };
    let idle = all()
        .flatten()
        .find(|rule| at(rule, "record") == "divvy:gpus_held_and_idle:count");
    let idle = idle
        .and_then(|rule| at(rule, "expr").as_str())
        .context("no rule of idle GPUs")?;
    ensure!(idle.contains("> 3600"), "idle GPUs are found by {idle}");
    poll("two GPUs that are held", PATIENCE, || {
        Ok(prometheus.number(&idle.replace("> 3600", ">= 0"))? == Some(2.0))
    })?;

    let over = format!("the firing alert of claim {}/over alone", env.namespace);
    poll(&over, PATIENCE, || {
        let alerts = prometheus.get("alerts")?;
        let mut found = at(&alerts, "data.alerts")
            .as_array()
            .into_iter()
            .flatten()
            .filter(|alert| {
                at(alert, "labels.alertname") == "DivvyClaimOverGrant"
                    && at(alert, "labels.namespace") == &*env.namespace
            });
        let Some(alert) = found.next() else {
            return Ok(false);
        };
        let said = at(alert, "annotations.summary")
            .as_str()
            .unwrap_or_default();
        Ok(at(alert, "state") == "firing"
            && said.contains(&format!("{}/over ", env.namespace))
            && found.next().is_none())
    })?;

    let answer = prometheus.get("rules")?;
    let groups = at(&answer, "data.groups").as_array().into_iter().flatten();
    let evaluated: Vec<&Value> = groups
        .filter_map(|group| at(group, "rules").as_array())
        .flatten()
        .collect();
    ensure!(
        evaluated.len() == all().flatten().count(),
        "Prometheus has {} rules",
        evaluated.len()
    );
    let ill: Vec<_> = evaluated
        .iter()
        .filter(|rule| at(rule, "health") != "ok")
        .collect();
    ensure!(ill.is_empty(), "rules that cannot be evaluated: {ill:?}");
    Ok(())
}

/// Every query of the chart's dashboards is understood, and has something to show unless it is
/// about what is not the case.
fn dashboards_have_data(env: &Env, prometheus: &Prometheus) -> Result<()> {
    let maps = rendered(env.cluster, "dashboards.yaml", "dashboards.enabled")?;
    let files = maps
        .iter()
        .filter_map(|map| at(map, "data").as_object())
        .flatten();
    let mut shown = 0;
    for (file, text) in files {
        let dashboard: Value =
            serde_json::from_str(text.as_str().unwrap_or_default()).context(file.clone())?;
        for (title, query) in queries(&dashboard)? {
            let filled = [
                ("$__rate_interval", "1m"),
                ("$namespace", &env.namespace),
                ("$claim", "over"),
                ("$node", ".*"),
            ];
            let filled = filled
                .iter()
                .fold(query, |query, (name, value)| query.replace(name, value));
            ensure!(
                !filled.contains('$'),
                "{file}, {title}: what is $… in {filled}?"
            );
            let series = prometheus
                .query(&filled)
                .with_context(|| format!("{file}, {title}"))?;
            let empty = EMPTY.iter().any(|part| filled.contains(part));
            ensure!(
                series.is_empty() == empty || filled.contains(FAULTS),
                "{file}, {title}: {} series of {filled}",
                series.len()
            );
            let unnamed = |one: &Value| {
                at(one, "metric")
                    .as_object()
                    .is_none_or(serde_json::Map::is_empty)
            };
            let variable = filled.starts_with("group by");
            ensure!(
                !(variable && series.iter().any(unnamed)),
                "{file}: {title} has no such label: {filled}"
            );
            shown += series.len();
        }
    }
    crate::process::say(&format!("{} dashboards, {shown} series", maps.len()));
    ensure!(maps.len() == 3, "the chart made {} dashboards", maps.len());
    Ok(())
}

/// The document's rule for prometheus-adapter, filled in as the adapter does it for these pods.
fn autoscalers_scale(env: &Env, prometheus: &Prometheus) -> Result<()> {
    let page = include_str!("../../../../../docs/usage.md");
    let mut blocks = page
        .split("```yaml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let block = blocks
        .find(|block| block.contains("seriesQuery"))
        .context("usage.md has no rule")?;
    let rules: Value = serde_saphyr::from_str(block)?;
    let text = |key: &str| {
        at(&rules, &format!("rules.0.{key}"))
            .as_str()
            .context(key.to_owned())
    };
    let found = prometheus.query(text("seriesQuery")?)?;
    let mut names: Vec<&str> = found
        .iter()
        .filter_map(|one| at(one, "metric.__name__").as_str())
        .collect();
    names.dedup();
    let &[series] = names.as_slice() else {
        anyhow::bail!("the rule is about {names:?}")
    };
    // Percent that a pod uses of the GPU, relative to the 20 % that a share was granted, or of its
    // partition.
    let expected = [
        ("over", 3.0),
        ("fine", 0.5),
        ("idle", 0.0),
        ("dark", 0.25),
        ("left", 0.8),
        ("right", 0.0),
    ];
    let pods: Vec<&str> = expected.iter().map(|(pod, _)| *pod).collect();
    let matchers = format!(
        "namespace=\"{}\",pod=~\"{}\"",
        env.namespace,
        pods.join("|")
    );
    let query = text("metricsQuery")?
        .replace("<<.GroupBy>>", "pod")
        .replace("<<.Series>>", series);
    let query = query.replace("<<.LabelMatchers>>", &matchers);
    let mut last = Vec::new();
    // The metric is the mean of a minute.
    poll("what autoscalers read", 2 * PATIENCE, || {
        last = prometheus.query(&query)?;
        let right = |(pod, ratio): &(&str, f64)| {
            let of = last.iter().find(|one| at(one, "metric.pod") == *pod);
            let value: Option<f64> = of.and_then(|one| at(one, "value.1").as_str()?.parse().ok());
            value.is_some_and(|value| (value - ratio).abs() < 0.01)
        };
        Ok(last.len() == expected.len() && expected.iter().all(right))
    })
    .with_context(|| format!("{query}: {last:?}"))
}

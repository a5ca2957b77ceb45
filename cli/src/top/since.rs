//! `divvy top namespaces --since 7d`: GPU time that Prometheus has of the last days.

use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kube::{Client, Config};
use serde::{Deserialize, Serialize};

use crate::format::{self, Output};
use crate::table::Table;

/// Column that a counter fills.
type Column = fn(&mut Time) -> &mut f64;

/// Counters of the node plugin.
const COLUMNS: [(&str, Column); 4] = [
    ("divvy_gpu_seconds_granted_total", |time| {
        &mut time.gpu_granted
    }),
    ("divvy_gpu_seconds_used_total", |time| &mut time.gpu_used),
    ("divvy_gpu_gib_seconds_granted_total", |time| {
        &mut time.gib_granted
    }),
    ("divvy_gpu_gib_seconds_used_total", |time| {
        &mut time.gib_used
    }),
];
const BLOCKED: &str = "divvy_gpu_seconds_blocked_total";
const HOUR: f64 = 3600.0;
const PATIENCE: Duration = Duration::from_secs(30);

/// Arguments of the sums.
#[derive(Debug, clap::Args)]
pub(super) struct Since {
    /// Sum the GPU time of this long until now, from Prometheus: 24h, 7d, 4w
    #[arg(long, value_name = "TIME", requires = "prometheus", value_parser = duration)]
    pub(super) since: Option<String>,
    /// Address of the Prometheus that scrapes the node plugins
    #[arg(
        long,
        value_name = "URL",
        env = "PROMETHEUS_URL",
        hide_env_values = true
    )]
    pub(super) prometheus: Option<String>,
}

/// Returns a duration as Prometheus writes it.
fn duration(text: &str) -> Result<String, String> {
    let number = text.strip_suffix(['m', 'h', 'd', 'w', 'y']);
    let is_one = |number: &str| number.parse::<u32>().is_ok_and(|number| number > 0);
    if number.is_some_and(is_one) {
        Ok(text.to_owned())
    } else {
        Err("not a time such as 24h, 7d or 4w".to_owned())
    }
}

/// The answer.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Sums {
    since: String,
    namespaces: Vec<Of>,
    /// Hours of whole GPUs that were held in part and could be had in no other form.
    gpu_hours_blocked: f64,
}

/// Time of a namespace; of one class, product and form, where these are asked for.
#[derive(Debug, PartialEq, Serialize)]
struct Of {
    namespace: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    product: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<String>,
    #[serde(flatten)]
    time: Time,
}

/// Sums, in hours.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Time {
    #[serde(rename = "gpuHoursGranted")]
    gpu_granted: f64,
    #[serde(rename = "gpuHoursUsed")]
    gpu_used: f64,
    #[serde(rename = "gibHoursGranted")]
    gib_granted: f64,
    #[serde(rename = "gibHoursUsed")]
    gib_used: f64,
}

pub(super) fn run(
    since: &str,
    prometheus: &str,
    namespace: Option<&str>,
    output: Output,
) -> Result<ExitCode> {
    let url = prometheus.parse();
    let url = url.with_context(|| {
        format!("--prometheus {prometheus:?} is not an address such as http://localhost:9090")
    })?;
    let mut config = Config::new(url);
    config.connect_timeout = Some(PATIENCE);
    config.read_timeout = Some(PATIENCE);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let fine = !matches!(output, Output::Table);
    let sums = runtime.block_on(async {
        let client = Client::try_from(config)?;
        read(&client, since, namespace, fine)
            .await
            .with_context(|| format!("asking Prometheus at {prometheus}"))
    })?;
    if sums.namespaces.is_empty() {
        bail!(
            "Prometheus has no GPU time of the last {since}: does it scrape the node plugins (metric {})? (docs/gpu-time.md)",
            COLUMNS[0].0
        );
    }
    format::show(&sums, output.format(), |sums| render(sums, fine))
        .context("writing the answer")?;
    Ok(ExitCode::SUCCESS)
}

/// Asks for each counter's increase.
async fn read(client: &Client, since: &str, namespace: Option<&str>, fine: bool) -> Result<Sums> {
    let by = if fine {
        "namespace,class,product,form"
    } else {
        "namespace"
    };
    let of = namespace
        .map(|name| format!("{{namespace={name:?}}}"))
        .unwrap_or_default();
    let mut times = BTreeMap::<[String; 4], Time>::new();
    for (metric, column) in COLUMNS {
        let query = format!("sum by ({by}) (increase({metric}{of}[{since}]))");
        for (labels, value) in ask(client, &query).await? {
            let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
            let key = ["namespace", "class", "product", "form"].map(label);
            *column(times.entry(key).or_default()) = value / HOUR;
        }
    }
    let blocked = format!("sum(increase({BLOCKED}[{since}]))");
    let blocked = ask(client, &blocked).await?;
    let mut namespaces: Vec<Of> = times
        .into_iter()
        .map(|([namespace, class, product, form], time)| Of {
            namespace,
            class: fine.then_some(class),
            product: fine.then_some(product),
            form: fine.then_some(form),
            time,
        })
        .collect();
    // The most first.
    namespaces.sort_by(|one, other| other.time.gpu_granted.total_cmp(&one.time.gpu_granted));
    Ok(Sums {
        since: since.to_owned(),
        namespaces,
        gpu_hours_blocked: blocked.first().map_or(0.0, |(_, value)| value / HOUR),
    })
}

/// Answer of Prometheus' HTTP API, `/api/v1/query`.
#[derive(Debug, Deserialize)]
struct Answer {
    status: String,
    #[serde(default)]
    error: String,
    data: Option<Data>,
}

#[derive(Debug, Deserialize)]
struct Data {
    result: Vec<Sample>,
}

#[derive(Debug, Deserialize)]
struct Sample {
    metric: BTreeMap<String, String>,
    value: (f64, String),
}

async fn ask(client: &Client, query: &str) -> Result<Vec<(BTreeMap<String, String>, f64)>> {
    let text: String = form_urlencoded::byte_serialize(query.as_bytes()).collect();
    let request = http::Request::get(format!("/api/v1/query?query={text}")).body(Vec::new())?;
    let answer: Answer = client.request(request).await?;
    ensure!(
        answer.status == "success",
        "it refuses {query}: {}",
        answer.error
    );
    let samples = answer.data.map(|data| data.result).unwrap_or_default();
    let read = |sample: Sample| {
        let value = sample.value.1.parse().context("a value is no number")?;
        Ok((sample.metric, value))
    };
    samples.into_iter().map(read).collect()
}

fn render(sums: &Sums, fine: bool) -> String {
    let mut table = if fine {
        Table::new([
            "NAMESPACE",
            "CLASS",
            "PRODUCT",
            "FORM",
            "GPU-HOURS",
            "USED",
            "GIB-HOURS",
            "USED",
        ])
    } else {
        Table::new(["NAMESPACE", "GPU-HOURS", "USED", "GIB-HOURS", "USED"])
    };
    let mut all = Time::default();
    for of in &sums.namespaces {
        let kinds = [&of.class, &of.product, &of.form].into_iter().flatten();
        let names = std::iter::once(&of.namespace).chain(kinds).cloned();
        table.cells(names.chain(of.time.cells()).collect());
        all.gpu_granted += of.time.gpu_granted;
        all.gpu_used += of.time.gpu_used;
        all.gib_granted += of.time.gib_granted;
        all.gib_used += of.time.gib_used;
    }
    let gaps = if fine { 3 } else { 0 };
    let name = std::iter::once("all".to_owned()).chain(std::iter::repeat_n(String::new(), gaps));
    table.cells(name.chain(all.cells()).collect());
    format!(
        "GPU time of the last {}\n{}\nheld in part, and to be had in no other form: {} GPU-hours",
        sums.since,
        table.render(0),
        Hours(sums.gpu_hours_blocked)
    )
}

impl Time {
    fn cells(&self) -> [String; 4] {
        [
            self.gpu_granted,
            self.gpu_used,
            self.gib_granted,
            self.gib_used,
        ]
        .map(|hours| Hours(hours).to_string())
    }
}

/// Hours with one digit.
struct Hours(f64);

impl fmt::Display for Hours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// A Prometheus that has this of each metric, by namespace and form; and what it was asked.
    fn prometheus(answer: serde_json::Value) -> (Client, Arc<Mutex<Vec<String>>>) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let queries = asked.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let query = request.uri().query().unwrap_or_default().to_owned();
            queries.lock().unwrap().push(query);
            let body = serde_json::to_vec(&answer).unwrap();
            async move { Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(body))) }
        });
        (Client::new(service, "default"), asked)
    }

    fn vector(samples: &[(&str, &str, f64)]) -> serde_json::Value {
        let result: Vec<_> = samples
            .iter()
            .map(|(namespace, form, value)| {
                json!({"metric": {"namespace": namespace, "form": form, "class": "gpus", "product": "H100"}, "value": [1.0, value.to_string()]})
            })
            .collect();
        json!({"status": "success", "data": {"resultType": "vector", "result": result}})
    }

    #[tokio::test]
    async fn sums_are_in_hours_with_the_most_first() {
        let two = vector(&[("a", "whole", 1800.0), ("b", "mps", 36000.0)]);
        let (client, asked) = prometheus(two);
        let sums = read(&client, "7d", None, true).await.unwrap();
        let shown = render(&sums, true);
        assert_eq!(
            shown,
            "GPU time of the last 7d\n\
             NAMESPACE  CLASS  PRODUCT  FORM   GPU-HOURS  USED  GIB-HOURS  USED\n\
             ─────────  ─────  ───────  ─────  ─────────  ────  ─────────  ────\n\
             b          gpus   H100     mps    10.0       10.0  10.0       10.0\n\
             a          gpus   H100     whole  0.5        0.5   0.5        0.5\n\
             all                               10.5       10.5  10.5       10.5\n\
             held in part, and to be had in no other form: 0.5 GPU-hours"
        );
        let asked = asked.lock().unwrap();
        assert_eq!(asked.len(), 5);
        assert!(
            asked[0].contains("divvy_gpu_seconds_granted_total%5B7d%5D"),
            "{}",
            asked[0]
        );
    }

    #[tokio::test]
    async fn one_namespace_is_asked_for_and_an_error_is_said() {
        let (client, asked) = prometheus(vector(&[("a", "", 3600.0)]));
        let sums = read(&client, "24h", Some("a"), false).await.unwrap();
        let hours = Hours(sums.namespaces[0].time.gpu_granted).to_string();
        assert_eq!(hours, "1.0");
        assert!(asked.lock().unwrap()[0].contains("namespace%3D%22a%22"));
        let (client, _) = prometheus(json!({"status": "error", "error": "too many samples"}));
        let error = read(&client, "24h", None, false).await.unwrap_err();
        assert!(error.to_string().ends_with(": too many samples"), "{error}");
    }

    #[test]
    fn times_are_those_of_prometheus() {
        for good in ["30m", "24h", "7d", "4w", "1y"] {
            assert_eq!(duration(good).as_deref(), Ok(good));
        }
        for bad in ["", "7", "d", "0d", "-1d", "7 d", "1d]) or (x", "1d12h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}

//! `divvy claim`: a claim template, and a pod that uses it, for what is asked for in words. Pure
//! but for the printing.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use divvy_api::names::{DRIVER, attributes, capacity};
use divvy_model::Quantity;

use self::template::{Claim, NAME, Request};
use crate::convert::Output;
use crate::{format, yaml};
use divvy_why::driver;

pub mod template;

/// Image of the pod, the same as that of the examples.
const IMAGE: &str = "docker.io/nvidia/cuda:12.9.1-base-ubuntu24.04";

/// Conditions under which a limit above the request is kept.
const LIMIT_NEEDS: &str = "note: a limit above the request needs nodes that cap memory, and shares: {burst: {memory: …}} in their GpuPolicy (docs/memory-caps.md#request-and-limit)";

/// Arguments of `divvy claim`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: Wanted,
    /// Name of the template; the pod is called so, too
    #[arg(long, global = true, value_name = "NAME", default_value = "gpu", value_parser = label)]
    name: String,
    /// Namespace of both; without it that of the context
    #[arg(short, long, global = true, value_name = "NAME", value_parser = label)]
    namespace: Option<String>,
    /// Name of the driver: with gpu.nvidia.com divvy stands in for NVIDIA's
    #[arg(long, global = true, value_name = "NAME", default_value = DRIVER, value_parser = PossibleValuesParser::new(driver::KNOWN))]
    driver_name: String,
    /// Kind of what uses the template
    #[arg(long, global = true, value_enum, value_name = "KIND", default_value_t = User::Pod)]
    kind: User,
    /// Image of its container
    #[arg(long, global = true, value_name = "IMAGE", default_value = IMAGE, value_parser = image)]
    image: String,
    /// Print the template alone
    #[arg(long, global = true, conflicts_with_all = ["kind", "image"])]
    template_only: bool,
    /// Output format; JSON is one List
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Kind of the object that uses the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum User {
    Pod,
    Deployment,
    Job,
}

/// Device to claim.
#[derive(Debug, clap::Subcommand)]
enum Wanted {
    /// Claim whole GPUs
    Gpu {
        #[command(flatten)]
        several: Several,
        /// Text in the product's name, such as H100
        #[arg(long, value_name = "TEXT", value_parser = plain)]
        product: Option<String>,
        /// Memory that each has at least, such as 40Gi
        #[arg(long, value_name = "AMOUNT", value_parser = memory)]
        min_memory: Option<String>,
    },
    /// Claim MIG partitions
    Mig {
        /// MIG profile, such as 1g.10gb
        #[arg(long, value_name = "PROFILE", value_parser = profile)]
        profile: String,
        #[command(flatten)]
        several: Several,
    },
    /// Claim a time-sliced share of a GPU
    Share {
        /// Memory, such as 10Gi; by default an equal part
        #[arg(long, value_name = "AMOUNT", value_parser = memory)]
        memory: Option<String>,
        /// Compute in percent of the GPU; by default an equal part
        #[arg(long, value_name = "PERCENT", value_parser = percent)]
        cores: Option<u8>,
        /// Percent of any GPU that a GpuPolicy shares by percent, such as 50 for half of it
        #[arg(long, value_name = "PERCENT", value_parser = percent, conflicts_with_all = ["memory", "cores"])]
        percent: Option<u8>,
        /// Number of shares, each of another GPU
        #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
        count: u8,
        /// Memory that it may use where the driver caps it, such as 16Gi or 50% of the GPU; by
        /// default what it requests
        #[arg(long, value_name = "AMOUNT", value_parser = limit)]
        limit: Option<String>,
    },
    /// Claim an MPS share of a GPU: programs of several claims run at once
    Mps {
        /// Memory, such as 10Gi, with driver R615 and later; by default, and before, that of a slot
        #[arg(long, value_name = "AMOUNT", value_parser = memory)]
        memory: Option<String>,
        /// Compute in percent of the GPU, likewise
        #[arg(long, value_name = "PERCENT", value_parser = percent)]
        cores: Option<u8>,
    },
}

impl Wanted {
    /// Returns the limit of a share's memory, and what is requested of the memory.
    fn limited(&self) -> Option<(&str, Option<String>)> {
        let Self::Share {
            memory,
            percent,
            limit: Some(limit),
            ..
        } = self
        else {
            return None;
        };
        let part = percent.map(|percent| format!("{percent}%"));
        Some((limit, part.or_else(|| memory.clone())))
    }
}

/// Number of devices, and what they have in common.
#[derive(Debug, clap::Args)]
struct Several {
    /// Number of devices
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    count: u8,
    /// Property that all of them share
    #[arg(long, value_enum, value_name = "PROPERTY")]
    same: Option<Same>,
}

/// Property that several devices share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Same {
    /// They reach each other over NVLink
    Nvlink,
    /// They are at one NUMA node
    Numa,
    /// They are below one PCIe root complex
    Pcie,
    /// They are on one card: for partitions
    Gpu,
}

impl Same {
    fn attribute(self, of: &str) -> String {
        let name = match self {
            Self::Nvlink => attributes::NVLINK_DOMAIN,
            Self::Numa => attributes::NUMA_NODE,
            Self::Pcie => attributes::PCIE_ROOT,
            Self::Gpu => attributes::GPU_UUID,
        };
        driver::attribute(of, name)
    }
}

/// Reads a name of an object that is a DNS label.
fn label(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_label = (1..=63).contains(&text.len())
        && text.starts_with(plain)
        && text.ends_with(plain)
        && text.chars().all(|c| plain(c) || c == '-');
    is_label
        .then(|| text.to_owned())
        .ok_or_else(|| "lower case letters, digits and '-' only".to_owned())
}

/// Reads a text that stands in a CEL string.
fn plain(text: &str) -> Result<String, String> {
    let is_plain = !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || " .+-".contains(c));
    is_plain
        .then(|| text.to_owned())
        .ok_or_else(|| "letters, digits, spaces, '.', '+' and '-' only".to_owned())
}

/// Reads an image's name, which stands in YAML without quotes.
fn image(text: &str) -> Result<String, String> {
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-/:@".contains(c));
    is_plain
        .then(|| text.to_owned())
        .ok_or_else(|| "letters, digits, '.', '_', '-', '/', ':' and '@' only".to_owned())
}

/// Returns the names of all MIG profiles of boards that are known.
fn profiles() -> BTreeSet<String> {
    let tables = divvy_boards::MIG_BOARDS
        .iter()
        .filter_map(|board| divvy_boards::mig_capabilities(board));
    tables
        .flat_map(|table| {
            let name = |profile| Some(table.name(profile)?.to_string());
            table.profiles().iter().filter_map(name).collect::<Vec<_>>()
        })
        .collect()
}

/// Reads a MIG profile that a known board has. A profile of its own has no claim that it serves.
fn profile(text: &str) -> Result<String, String> {
    let text = plain(text)?;
    let known = profiles();
    if known.contains(&text) {
        return Ok(text);
    }
    let letters = |name: &str| {
        let plain = name.chars().filter(char::is_ascii_alphanumeric);
        plain.map(|c| c.to_ascii_lowercase()).collect::<String>()
    };
    // Those with media engines have more in their names.
    let usual = known.iter().filter(|name| !name.contains(['+', '-']));
    let usual: Vec<&str> = usual.map(String::as_str).collect();
    let same = usual.iter().find(|name| letters(name) == letters(&text));
    let start = format!("{}.", text.to_ascii_lowercase());
    let longer: Vec<&str> = usual
        .iter()
        .copied()
        .filter(|name| name.starts_with(&start))
        .collect();
    Err(match same {
        Some(same) => format!("no GPU has this profile: write {same}"),
        None if !longer.is_empty() => {
            format!("no GPU has this profile: write {}", longer.join(", "))
        }
        None => format!("no GPU has this profile; there are {}", usual.join(", ")),
    })
}

/// Reads whole percent of a GPU.
fn percent(text: &str) -> Result<u8, String> {
    let whole = text.trim_end_matches('%').trim();
    match (
        text.parse::<u32>(),
        whole.parse::<u32>(),
        whole.parse::<f64>(),
    ) {
        (Ok(percent @ 1..=100), ..) => {
            u8::try_from(percent).map_err(|_| format!("{percent} is not in 1..=100"))
        }
        (Ok(other), ..) => Err(format!("{other} is not in 1..=100")),
        (_, Ok(percent @ 1..=100), _) => Err(format!("whole percent of a GPU: write {percent}")),
        // A fraction is of 1.
        (_, _, Ok(part)) if part > 0.0 && part < 1.0 => Err(format!(
            "whole percent of a GPU: write {:.0}",
            (part * 100.0).max(1.0)
        )),
        (_, _, Ok(part)) if (1.0..=100.0).contains(&part) => {
            Err(format!("whole percent of a GPU: write {part:.0}"))
        }
        _ => Err("whole percent of a GPU: write 10 for a tenth of it".to_owned()),
    }
}

/// Returns the amounts that a whole number without a unit may stand for; none of anything else.
pub fn with_unit(text: &str) -> Vec<String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse::<u32>().ok();
    let units: &[&str] = match number.filter(|_| is_number) {
        None | Some(0) => &[],
        Some(1..1024) => &["Gi", "Mi"],
        Some(_) => &["Mi"],
    };
    units.iter().map(|unit| format!("{text}{unit}")).collect()
}

/// Reads an amount of memory of at least 1Mi.
fn memory(text: &str) -> Result<String, String> {
    match text.parse::<Quantity>() {
        Ok(amount) if amount.rounded_up() >= 1 << 20 => Ok(text.to_owned()),
        Ok(_) => Err(match with_unit(text).as_slice() {
            [] => "less than 1Mi: write 1Mi or more; without it, the share is an equal part"
                .to_owned(),
            units => format!("less than 1Mi: write {}", units.join(" or ")),
        }),
        Err(_) => Err("not an amount: write 10Gi or 512Mi".to_owned()),
    }
}

/// Reads the limit of a share's memory, as a `ShareConfig` does.
fn limit(text: &str) -> Result<String, String> {
    let config = serde_json::json!({
        "apiVersion": divvy_api::names::API_VERSION,
        "kind": divvy_api::ConfigKind::Share.name(),
        "limits": {"memory": text},
    });
    match divvy_api::decode(&config) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("no limit of memory: write 16Gi, or 50% for half of the GPU".to_owned()),
    }
}

/// Prints the manifests.
pub fn run(args: &Args) -> Result<ExitCode> {
    if let Wanted::Gpu { several, .. } | Wanted::Mig { several, .. } = &args.what
        && several.count < 2
        && several.same.is_some()
    {
        return Err(crate::Usage("--same needs --count 2 or more".to_owned()).into());
    }
    if let Some((limit, Some(request))) = args.what.limited()
        && in_percent(limit, &request).is_some_and(|percent| percent < 100)
    {
        let what = format!("--limit {limit} is less than the request of {request}");
        return Err(crate::Usage(what).into());
    }
    let text = args.manifests()?;
    match args.output {
        Output::Yaml => format::print(text.trim_end())?,
        Output::Json => format::print(&yaml::json(&yaml::documents("manifests", &text)?)?)?,
    }
    let claim = args.claim();
    for note in crate::convert::policies(&claim.requests) {
        format::talk(&note.to_string());
    }
    if claim.limit.is_some() {
        format::talk(LIMIT_NEEDS);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a limit in percent of a request, rounded up, where both are amounts or both are percent
/// of the GPU.
fn in_percent(limit: &str, request: &str) -> Option<i128> {
    let number = |text: &str| text.parse::<Quantity>().ok().map(|q| q.rounded_up());
    let both = match (limit.strip_suffix('%'), request.strip_suffix('%')) {
        (Some(limit), Some(request)) => number(limit).zip(number(request)),
        (None, None) => number(limit).zip(number(request)),
        _ => None,
    };
    let (limit, request) = both.filter(|(_, request)| *request > 0)?;
    let hundred = limit.checked_mul(100)?;
    Some(hundred.div_euclid(request) + i128::from(hundred.rem_euclid(request) > 0))
}

/// Returns the least `memoryLimitMaxPercent` of a share that allows the limit, as far as it is
/// known: any share that is kept within a limit has 100.
fn factor(limit: &str, request: Option<&str>) -> i128 {
    let known = request.and_then(|request| in_percent(limit, request));
    known.unwrap_or(100).max(100)
}

impl Args {
    fn manifests(&self) -> Result<String> {
        let claim = self.claim();
        let name = &self.name;
        let template = yaml::text(&claim.template(name, self.namespace.as_deref()))?;
        if self.template_only {
            return Ok(template);
        }
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or_else(String::new, |name| format!("\n  namespace: {name}"));
        let head = |version: &str, kind: &str| {
            format!(
                "apiVersion: {version}\nkind: {kind}\nmetadata:\n  name: {name}{namespace}\nspec:\n"
            )
        };
        let user = match self.kind {
            User::Pod => format!(
                "# The same lines go into spec.template.spec of a Deployment or Job.\n{}{}",
                head("v1", "Pod"),
                self.pod("  ")
            ),
            // A new pod beside the old one would wait for its GPU.
            User::Deployment => format!(
                "{}  replicas: 1\n  strategy:\n    type: Recreate\n  selector:\n    matchLabels:\n      app: {name}\n  template:\n    \
                 metadata:\n      labels:\n        app: {name}\n    spec:\n{}",
                head("apps/v1", "Deployment"),
                self.pod("      ")
            ),
            User::Job => format!(
                "{}  template:\n    spec:\n      restartPolicy: Never\n{}",
                head("batch/v1", "Job"),
                self.pod("      ")
            ),
        };
        Ok(format!("{template}---\n{user}"))
    }

    /// Returns the spec of a pod, each line after `indent`.
    fn pod(&self, indent: &str) -> String {
        let goes_on = if self.kind == User::Job {
            ""
        } else {
            "; exec sleep infinity"
        };
        let (name, image) = (&self.name, &self.image);
        let lines = format!(
            "resourceClaims:
- name: {NAME}
  resourceClaimTemplateName: {name}
containers:
- name: main
  image: {image}
  command: [\"sh\", \"-c\", \"nvidia-smi -L{goes_on}\"]
  resources:
    claims:
    - name: {NAME}
"
        );
        let indented = |line: &str| format!("{indent}{line}\n");
        lines.lines().map(indented).collect()
    }

    fn claim(&self) -> Claim {
        let driver = driver::known(&self.driver_name);
        let (request, same) = match &self.what {
            Wanted::Gpu {
                several,
                product,
                min_memory,
            } => {
                let mut request = Request::gpus(several.count.into());
                if let Some(memory) = min_memory {
                    let has = template::capacity(driver, capacity::MEMORY);
                    request.select(format!("{has}.compareTo(quantity({memory:?})) >= 0"));
                }
                if let Some(product) = product {
                    let name = template::attribute(driver, attributes::PRODUCT_NAME);
                    request.select(format!("{name}.contains({product:?})"));
                }
                (request, several.same)
            }
            Wanted::Mig { profile, several } => {
                let request = Request::of_profile(driver, profile, several.count.into());
                (request, several.same)
            }
            Wanted::Share {
                percent: Some(percent),
                count,
                ..
            } => (Request::fractions((*count).into(), (*percent).into()), None),
            Wanted::Share {
                memory,
                cores,
                count,
                ..
            } => {
                let (count, cores) = (u64::from(*count), cores.map(u64::from));
                (Request::shares(count, memory.as_deref(), cores), None)
            }
            Wanted::Mps { memory, cores } => {
                let cores = cores.map(u64::from);
                (Request::mps_share(memory.as_deref(), cores), None)
            }
        };
        let mut request = request;
        let limited = self.what.limited();
        if let Some((limit, requested)) = &limited {
            let most = template::attribute(driver, attributes::MEMORY_LIMIT_MAX_PERCENT);
            request.select(format!("{most} >= {}", factor(limit, requested.as_deref())));
        }
        Claim {
            driver,
            requests: vec![request],
            same: same
                .map(|same| same.attribute(driver))
                .into_iter()
                .collect(),
            limit: limited.map(|(limit, _)| limit.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Returns what `divvy claim` prints for these words.
    fn manifests(words: &str) -> String {
        let words = ["claim"].into_iter().chain(words.split_whitespace());
        Line::try_parse_from(words)
            .unwrap()
            .args
            .manifests()
            .unwrap()
    }

    #[test]
    fn each_claim_is_as_in_its_golden_file() {
        for (words, file) in [
            ("gpu", "gpu"),
            (
                "gpu --count 2 --same nvlink --product H100",
                "gpus-by-nvlink",
            ),
            ("mig --profile 1g.10gb", "mig"),
            (
                "mig --profile 1g.10gb --count 2 --same gpu --name pair -n team",
                "mig-pair",
            ),
            ("share --memory 10Gi --cores 10", "share"),
            ("share", "share-by-default"),
            ("share --percent 50", "share-by-percent"),
            ("share --memory 10Gi --limit 16Gi", "share-with-limit"),
            ("share --limit 50%", "share-with-limit-in-percent"),
            (
                "gpu --min-memory 40Gi --kind deployment --image example.com/a:1",
                "gpu-of-a-deployment",
            ),
            (
                "share --memory 4Gi --count 2 --kind job -n t",
                "shares-of-a-job",
            ),
            ("mps --memory 8Gi --cores 25", "mps"),
            ("mps --template-only", "mps-template"),
            (
                "mig --profile 1g.10gb --count 2 --same gpu --driver-name gpu.nvidia.com",
                "mig-pair-of-a-stand-in",
            ),
            (
                "share --memory 10Gi --cores 10 --limit 16Gi --driver-name gpu.nvidia.com",
                "share-of-a-stand-in",
            ),
        ] {
            crate::golden::same(&format!("claim/{file}.yaml"), manifests(words).trim_end());
        }
    }

    #[test]
    fn a_limit_in_percent_of_its_request_is_rounded_up() {
        assert_eq!(in_percent("9Gi", "10Gi"), Some(90));
        assert_eq!(in_percent("16Gi", "10Gi"), Some(160));
        assert_eq!(in_percent("10Gi", "9Gi"), Some(112));
        assert_eq!(in_percent("75%", "50%"), Some(150));
        assert_eq!(in_percent("5%", "10Gi"), None);
        assert_eq!(factor("5%", Some("10Gi")), 100);
    }

    #[test]
    fn words_that_make_no_claim_are_refused() {
        for (words, says) in [
            ("share --memory 10", "less than 1Mi: write 10Gi or 10Mi"),
            ("share --memory 8192", "less than 1Mi: write 8192Mi"),
            ("share --memory 500Ki", "less than 1Mi: write 1Mi or more"),
            ("share --memory 0", "less than 1Mi: write 1Mi or more"),
            ("share --memory 0Gi", "less than 1Mi: write 1Mi or more"),
            ("share --memory 0.5", "less than 1Mi: write 1Mi or more"),
            ("share --memory 1e3", "less than 1Mi: write 1Mi or more"),
            ("share --memory 10GB", "not an amount"),
            ("share --limit 16", "write 16Gi, or 50% for half of the GPU"),
            ("share --limit 101%", "no limit of memory"),
            ("share --cores 101", "101 is not in 1..=100"),
            ("share --percent 0", "0 is not in 1..=100"),
            ("share --percent 50 --memory 1Gi", "cannot be used with"),
            ("share --cores 10%", "whole percent of a GPU: write 10"),
            ("share --cores 0.1", "whole percent of a GPU: write 10"),
            ("share --percent 0.5", "whole percent of a GPU: write 50"),
            ("share --percent 12.5", "whole percent of a GPU: write 12"),
            ("mps --cores half", "write 10 for a tenth of it"),
            ("mig --profile 7g", "no GPU has this profile: write 7g."),
            (
                "mig --profile 1g.10Gb",
                "no GPU has this profile: write 1g.10gb",
            ),
            (
                "mig --profile 9g.90gb",
                "no GPU has this profile; there are 1g.10gb",
            ),
            ("gpu --min-memory 40", "less than 1Mi: write 40Gi"),
            ("gpu --image a;b", "only"),
            ("gpu --template-only --kind job", "cannot be used with"),
            ("mig", "--profile"),
            ("mig --profile 1g\"", "letters, digits"),
            ("gpu --name Big", "lower case letters"),
            ("gpu --count 0", "0 is not in 1..=32"),
        ] {
            let words = ["claim"].into_iter().chain(words.split_whitespace());
            let error = Line::try_parse_from(words).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}

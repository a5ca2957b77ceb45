//! `divvy claim`: a claim template, and a pod that uses it, for what is asked for in words. Pure
//! but for the printing.

use std::process::ExitCode;

use anyhow::Result;
use divvy_api::names::attributes;
use divvy_model::Quantity;

use self::template::{Claim, NAME, Request};
use crate::{format, yaml};

pub(crate) mod template;

/// Image of the pod, the same as that of the examples.
const IMAGE: &str = "docker.io/nvidia/cuda:12.9.1-base-ubuntu24.04";

/// Arguments of `divvy claim`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Wanted,
    /// Name of the template; the pod is called so, too
    #[arg(long, global = true, value_name = "NAME", default_value = "gpu", value_parser = label)]
    name: String,
    /// Namespace of both; without it that of the context
    #[arg(short, long, global = true, value_name = "NAME", value_parser = label)]
    namespace: Option<String>,
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
    },
    /// Claim MIG partitions
    Mig {
        /// MIG profile, such as 1g.10gb
        #[arg(long, value_name = "PROFILE", value_parser = plain)]
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
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
        cores: Option<u8>,
        /// Percent of any GPU that a GpuPolicy shares by percent, such as 50 for half of it
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100), conflicts_with_all = ["memory", "cores"])]
        percent: Option<u8>,
    },
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
    fn attribute(self) -> String {
        template::qualified(match self {
            Self::Nvlink => attributes::NVLINK_DOMAIN,
            Self::Numa => attributes::NUMA_NODE,
            Self::Pcie => attributes::PCIE_ROOT,
            Self::Gpu => attributes::GPU_UUID,
        })
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

/// Reads an amount of memory of at least 1Mi.
fn memory(text: &str) -> Result<String, String> {
    match text.parse::<Quantity>() {
        Ok(amount) if amount.rounded_up() >= 1 << 20 => Ok(text.to_owned()),
        Ok(_) => Err(format!("less than 1Mi: write {text}Gi or {text}Mi")),
        Err(_) => Err("not an amount: write 10Gi or 512Mi".to_owned()),
    }
}

/// Prints the manifests.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if let Wanted::Gpu { several, .. } | Wanted::Mig { several, .. } = &args.what
        && several.count < 2
        && several.same.is_some()
    {
        return Err(crate::Usage("--same needs --count 2 or more".to_owned()).into());
    }
    format::print(args.manifests()?.trim_end())?;
    for note in crate::convert::policies(&args.claim().requests) {
        format::talk(&note.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn manifests(&self) -> Result<String> {
        let claim = self.claim();
        let name = &self.name;
        let template = yaml::text(&claim.template(name, self.namespace.as_deref()))?;
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or_else(String::new, |name| format!("\n  namespace: {name}"));
        Ok(format!(
            "{template}---
# The same lines go into spec.template.spec of a Deployment or Job.
apiVersion: v1
kind: Pod
metadata:
  name: {name}{namespace}
spec:
  resourceClaims:
  - name: {NAME}
    resourceClaimTemplateName: {name}
  containers:
  - name: main
    image: {IMAGE}
    command: [\"sh\", \"-c\", \"nvidia-smi -L; exec sleep infinity\"]
    resources:
      claims:
      - name: {NAME}
"
        ))
    }

    fn claim(&self) -> Claim {
        let (request, same) = match &self.what {
            Wanted::Gpu { several, product } => {
                let mut request = Request::gpus(several.count.into());
                if let Some(product) = product {
                    let name = template::attribute(attributes::PRODUCT_NAME);
                    request.select(format!("{name}.contains({product:?})"));
                }
                (request, several.same)
            }
            Wanted::Mig { profile, several } => {
                let request = Request::of_profile(profile, several.count.into());
                (request, several.same)
            }
            Wanted::Share {
                percent: Some(percent),
                ..
            } => (Request::fractions(1, (*percent).into()), None),
            Wanted::Share { memory, cores, .. } => {
                let cores = cores.map(u64::from);
                (Request::shares(1, memory.as_deref(), cores), None)
            }
        };
        Claim {
            requests: vec![request],
            same: same.map(Same::attribute).into_iter().collect(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Returns what `divvy claim` prints for these words.
    pub(crate) fn manifests(words: &str) -> String {
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
        ] {
            crate::golden::same(&format!("claim/{file}.yaml"), manifests(words).trim_end());
        }
    }

    #[test]
    fn words_that_make_no_claim_are_refused() {
        for (words, says) in [
            ("share --memory 10", "less than 1Mi: write 10Gi or 10Mi"),
            ("share --memory 10GB", "not an amount"),
            ("share --cores 101", "101 is not in 1..=100"),
            ("share --percent 0", "0 is not in 1..=100"),
            ("share --percent 50 --memory 1Gi", "cannot be used with"),
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

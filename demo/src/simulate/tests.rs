use clap::Parser;
use serde_json::Value;

use super::*;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    args: Args,
}

fn answered(arguments: &[&str]) -> Result<Answer> {
    let all = std::iter::once(&"simulate").chain(arguments);
    answer(&Command::try_parse_from(all)?.args)
}

fn file(folder: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    fs_err::write(&path, text).unwrap();
    path.display().to_string()
}

const EVERYTHING: &str = "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {name: all}\n\
                          spec: {rules: [{modes: [Whole, Mig, TimeSlicing]}]}\n";

#[test]
fn policies_are_compared_on_the_same_trace() {
    let folder = tempfile::tempdir().unwrap();
    let policy = file(&folder, "all.yaml", EVERYTHING);
    let whole = file(
        &folder,
        "whole.yaml",
        &EVERYTHING.replace("Whole, Mig, TimeSlicing", "Whole"),
    );
    let trace = "time,namespace,request,duration,priority\n0,a,share:10Gi,60,\n1,a,mig:3g.40gb,60,\n2,a,8*gpu,60,\n";
    let trace = file(&folder, "trace.csv", trace);
    let arguments = [
        "--sim", "2*h100x8", "--trace", &trace, "--policy", &policy, "--policy", &whole,
    ];
    let answer = answered(&arguments).unwrap();
    let accepted: Vec<usize> = answer.runs.iter().map(|run| run.report.accepted).collect();
    assert_eq!(accepted, [3, 1]);
    let waiting: Vec<&str> = answer.runs[1]
        .report
        .waiting
        .iter()
        .map(|of| of.request.as_str())
        .collect();
    assert_eq!(waiting, ["share:10Gi", "mig:3g.40gb"]);
    // The table has all of it, and says what is left out.
    let text = text::table(&answer);
    for part in [
        "accepted",
        "all.yaml",
        "share:10Gi waits: no node has it, even when all is free",
        "Not modelled:",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = serde_json::to_value(&answer).unwrap();
    assert_eq!(json["runs"][0]["accepted"], Value::from(3));
    assert_eq!(
        json,
        serde_json::to_value(answered(&arguments).unwrap()).unwrap()
    );
}

#[test]
fn the_page_has_each_run_over_time_and_loads_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let trace = "time,namespace,request,duration,priority\n0,a,8*gpu,60,\n100,b,gpu,60,\n";
    let trace = file(&folder, "trace.csv", trace);
    let arguments = [
        "--sim", "h100x8", "--sim", "2*h100x8", "--trace", &trace, "-o", "html",
    ];
    let answer = answered(&arguments).unwrap();
    let page = html::page(&answer).unwrap();
    let data = data_of(&page);
    assert_eq!(data[1]["name"], "2*h100x8");
    assert_eq!(data[1]["nodes"].as_array().map(Vec::len), Some(2));
    assert_eq!(data[0]["moments"].as_array().map(Vec::len), Some(96));
    assert_eq!(data[0]["moments"][0]["held"][0], "aaaaaaaa");
    assert_eq!(data[0]["moments"][95]["held"][0], "0000000a");
    // The figures are in it, and nothing that a browser would fetch.
    assert!(page.contains("waiting at the last arrival"));
    for outside in ["http:", "https:", "src=", "href=", "url(", "import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert_eq!(page.matches("</script>").count(), 1);
    // What is said in a name stays text.
    let mut answer = answer;
    for name in ["</script><b>", "/*DATA*/", "<!--TABLE-->"] {
        answer.runs[0].name = name.to_owned();
        let page = html::page(&answer).unwrap();
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(!page.contains("<b>"));
        assert_eq!(data_of(&page)[0]["name"], name);
    }
}

/// Returns the data in a page.
fn data_of(page: &str) -> Value {
    let (_, data) = page.split_once("const runs = ").unwrap();
    let (data, _) = data.split_once(";\n").unwrap();
    serde_json::from_str(data).unwrap()
}

#[test]
fn the_assignment_of_each_pod_is_written_as_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let trace =
        "time,namespace,request,duration,priority\n0,a,8*gpu,60,\n1,b,gpu,60,\n1.5,c,9*gpu,60,\n";
    let trace = file(&folder, "trace.csv", trace);
    let lines = folder.path().join("lines");
    let to = lines.display().to_string();
    let arguments = [
        "simulate",
        "--sim",
        "2*h100x8",
        "--trace",
        &trace,
        "--assignments",
        &to,
    ];
    run(&Command::try_parse_from(arguments).unwrap().args).unwrap();
    let text = fs_err::read_to_string(&lines).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [first, second] = lines.as_slice() else {
        panic!("{text}")
    };
    assert_eq!(first["request"], "8*gpu");
    assert_eq!(first["devices"].as_array().map(Vec::len), Some(8));
    assert_eq!(
        (&second["name"], &second["at"]),
        (&Value::from("b"), &Value::from(1.0))
    );
    assert_eq!(second["devices"], serde_json::json!(["gpu-7"]));
    assert_ne!(first["node"], second["node"]);
    assert!(
        first["node"].as_str().unwrap().starts_with("h100x8-"),
        "{text}"
    );
    // With several columns it would not say of which.
    let arguments = arguments.into_iter().chain(["--sim", "h100x8"]);
    let error = run(&Command::try_parse_from(arguments).unwrap().args).unwrap_err();
    assert!(error.to_string().contains("--assignments is of one run"));
}

#[test]
fn replicas_and_templates_of_manifests_are_pods_of_the_workload() {
    let folder = tempfile::tempdir().unwrap();
    let text = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: two}\nspec:\n  spec:\n    devices:\n      \
                requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev, count: 2}}]\n---\n\
                apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 5\n  selector: {matchLabels: {a: b}}\n  \
                template:\n    metadata: {labels: {a: b}}\n    spec:\n      containers: [{name: c, image: i, resources: {claims: [{name: g}]}}]\n      \
                resourceClaims: [{name: g, resourceClaimTemplateName: two}]\n";
    let manifests = file(&folder, "web.yaml", text);
    let trace = file(
        &folder,
        "trace.jsonl",
        "{\"time\": 5, \"namespace\": \"x\", \"request\": \"template:two\"}\n",
    );
    let answer = answered(&[
        "--sim", "h100x8", "--sim", "2*h100x8", "-f", &manifests, "--trace", &trace,
    ])
    .unwrap();
    let figures: Vec<(usize, usize, usize)> = answer
        .runs
        .iter()
        .map(|run| {
            (
                run.report.pods,
                run.report.accepted,
                run.report.stranded.len(),
            )
        })
        .collect();
    // Pods of the deployment and of the trace are of one shape.
    assert_eq!(figures, [(6, 4, 1), (6, 6, 1)]);
}

#[test]
fn nodes_come_from_a_file_as_kubectl_prints_them() {
    let folder = tempfile::tempdir().unwrap();
    let fleet = "l4x2"
        .parse::<Spec>()
        .unwrap()
        .nodes(DRIVER, &[], &[])
        .unwrap();
    let mut items = Vec::new();
    for name in ["b", "a"] {
        let kind = &fleet.kinds[0];
        let mut node = serde_json::to_value(&kind.node).unwrap();
        node["metadata"]["name"] = Value::from(name);
        items.push(node);
        for slice in &kind.slices {
            let mut slice = slice.clone();
            slice.metadata.name = Some(format!(
                "{name}-{}",
                slice.metadata.name.unwrap_or_default()
            ));
            slice.spec.node_name = Some(name.to_owned());
            slice.spec.pool.name = format!("{name}/divvy");
            items.push(serde_json::to_value(&slice).unwrap());
        }
    }
    let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": items});
    let nodes = file(&folder, "nodes.yaml", &list.to_string());
    let answer = answered(&[
        "--nodes",
        &nodes,
        "--generate",
        "training=40",
        "--hours",
        "1",
    ])
    .unwrap();
    let report = &answer.runs[0].report;
    assert_eq!((report.nodes, report.pods), (2, 40));
    assert!(report.accepted > 0, "{report:?}");
    let empty = file(&folder, "empty.yaml", "kind: Pod\n");
    assert!(
        answered(&["--nodes", &empty, "--generate", "training=1"])
            .unwrap_err()
            .to_string()
            .contains("no Node in it")
    );
}

#[test]
fn arguments_that_make_no_run_say_what_to_give() {
    for (arguments, says) in [
        (
            vec!["--generate", "training=1"],
            "give a fleet (--sim 40*h100x8)",
        ),
        (vec!["--sim", "h100"], "no pods: give manifests"),
        (
            vec!["--sim", "h100", "--generate", "games=1"],
            "there are notebooks, inference, training",
        ),
        (
            vec!["--sim", "h100", "--generate", "training=1", "--hours", "0"],
            "hours are more than 0",
        ),
        (
            vec![
                "--sim",
                "h100",
                "--generate",
                "training=1",
                "--kubernetes",
                "1.33",
            ],
            "a release is 1.34",
        ),
    ] {
        let error = answered(&arguments).unwrap_err().to_string();
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
}

/// A class with the name that GPUs have as an extended resource.
const NAMED: &str = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: named}\n\
                     spec: {extendedResourceName: example.com/gpu, selectors: [{cel: {expression: \"device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'gpu'\"}}]}\n";

/// Pods of an extended resource are packed by the weight of their devices; those of a mix by the
/// processor time that they request.
#[test]
fn strategies_are_compared_and_pack_what_has_a_weight() {
    let folder = tempfile::tempdir().unwrap();
    let class = file(&folder, "class.yaml", NAMED);
    // Of a node's eight GPUs half are left on each node, or on one of the two.
    let mut trace = "time,namespace,request,duration,priority\n".to_owned();
    for second in 0..8 {
        trace += &format!("{second},a,example.com/gpu,,\n");
    }
    trace += "9,a,8*example.com/gpu,,\n";
    let trace = file(&folder, "trace.csv", &trace);
    let both = [
        "--strategy",
        "least-allocated",
        "--strategy",
        "most-allocated",
    ];
    let accepted = |more: &[&str]| {
        let arguments = ["--sim", "2*h100x8", "--trace", &trace, "-f", &class];
        let answer = answered(&[&arguments[..], &both, more].concat()).unwrap();
        let of = |run: &OneRun| (run.name.clone(), run.report.accepted);
        answer.runs.iter().map(of).collect::<Vec<_>>()
    };
    let named = |least, most| {
        let names = ["least-allocated", "most-allocated"].map(str::to_owned);
        names.into_iter().zip([least, most]).collect::<Vec<_>>()
    };
    assert_eq!(accepted(&["--device-weight", "5"]), named(8, 9));
    let resources = ["--node-resources", "192,2Ti", "--pod-resources", "20,240Gi"];
    assert_eq!(accepted(&resources), named(8, 9));
    let arguments = ["--sim", "2*h100x8", "--trace", &trace, "-f", &class];
    // A pod of eight GPUs is too large for a node, and one of a GPU is not.
    let more = ["--node-resources", "192,2Ti", "--pod-resources", "25,1Gi"];
    assert_eq!(
        answered(&[&arguments[..], &more].concat()).unwrap().runs[0]
            .report
            .accepted,
        8
    );
    let drawn = ["--sim", "h100x8", "-f", &class, "--generate", "training=9"];
    let answer = answered(&[&drawn[..], &["--limits", "example.com/gpu"]].concat()).unwrap();
    assert_eq!(answer.runs[0].report.pods, 9);
    let odd = |more: &[&str]| {
        let error = answered(&[&arguments[..], more].concat()).unwrap_err();
        error.to_string()
    };
    assert!(odd(&["--pod-resources", "20"]).contains("such as 192,2Ti"));
    let without = ["--sim", "2*h100x8", "--trace", &trace];
    let error = format!("{:#}", answered(&without).unwrap_err());
    assert!(
        error.contains("no DeviceClass has the extended resource example.com/gpu"),
        "{error}"
    );
}

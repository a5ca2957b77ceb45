//! The chart beside DeviceClasses that a cluster has already: helm asks an API server that this
//! file plays.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::Helm;

/// Values, classes of the cluster, and the answer that helm must give.
struct Case {
    values: &'static str,
    classes: &'static [Class],
    /// Parts of the refusal; none: the classes are no obstacle.
    says: &'static [&'static str],
}

/// Name, extended resource, and release (in the namespace `gpus`) of a class of the cluster.
type Class = (&'static str, &'static str, Option<&'static str>);

const CASES: &[Case] = &[
    Case {
        values: "{}",
        classes: &[("gpu.nvidia.com", "nvidia.com/gpu", Some("nvidia"))],
        says: &[
            "DeviceClass gpu.nvidia.com of this cluster stands for nvidia.com/gpu already",
            "set deviceClass.extendedResourceNames.gpu to \"\"",
            "deviceclass.resource.kubernetes.io/gpu.divvy.dev",
        ],
    },
    Case {
        values: "{}",
        classes: &[("half", "nvidia.com/mig-3g.40gb", None)],
        says: &[
            "DeviceClass half of this cluster stands for nvidia.com/mig-3g.40gb already",
            "take 3g.40gb out of migClasses",
        ],
    },
    Case {
        values: "extraDeviceClasses: [{name: big, mode: gpu, extendedResourceName: example.com/big}]",
        classes: &[("large", "example.com/big", None)],
        says: &["take extendedResourceName out of extraDeviceClasses, big"],
    },
    // All at once: a second release beside a first has the names of all its classes.
    Case {
        values: "{}",
        classes: &[
            ("half", "nvidia.com/mig-3g.40gb", Some("first")),
            ("whole", "nvidia.com/gpu", Some("first")),
        ],
        says: &[
            "DeviceClass half of this cluster stands for nvidia.com/mig-3g.40gb already",
            "; DeviceClass whole of this cluster stands for nvidia.com/gpu already",
            "take 3g.40gb out of migClasses",
            "set deviceClass.extendedResourceNames.gpu to \"\"",
        ],
    },
    // The fixes.
    Case {
        values: "deviceClass: {extendedResourceNames: {gpu: ''}}",
        classes: &[("gpu.nvidia.com", "nvidia.com/gpu", None)],
        says: &[],
    },
    Case {
        values: "migClasses: [1g.10gb]",
        classes: &[("half", "nvidia.com/mig-3g.40gb", None)],
        says: &[],
    },
    // An upgrade finds its own classes.
    Case {
        values: "{}",
        classes: &[("gpu.divvy.dev", "nvidia.com/gpu", Some("divvy"))],
        says: &[],
    },
    // It takes a name away from a class, or gives it to one, and not both at once: the driver gets
    // another name, or a resource another class.
    Case {
        values: "driverName: gpu.nvidia.com",
        classes: &[("gpu.divvy.dev", "nvidia.com/gpu", Some("divvy"))],
        says: &[
            "this upgrade moves nvidia.com/gpu from DeviceClass gpu.divvy.dev to gpu.nvidia.com",
            "upgrade once before with other values, set deviceClass.extendedResourceNames.gpu to \"\"",
        ],
    },
    Case {
        values: "deviceClass: {extendedResourceNames: {gpu: '', share: nvidia.com/gpu}}",
        classes: &[("gpu.divvy.dev", "nvidia.com/gpu", Some("divvy"))],
        says: &["from DeviceClass gpu.divvy.dev to share.divvy.dev"],
    },
    Case {
        values: "{driverName: gpu.nvidia.com, deviceClass: {extendedResourceNames: {gpu: ''}}}",
        classes: &[("gpu.divvy.dev", "nvidia.com/gpu", Some("divvy"))],
        says: &[],
    },
    // Helm itself refuses a class of another release, unless it is taken over.
    Case {
        values: "{nvidiaDeviceClasses: {enabled: true, extendedResourceName: nvidia.com/gpu},
                  deviceClass: {extendedResourceNames: {gpu: ''}}}",
        classes: &[("gpu.nvidia.com", "nvidia.com/gpu", Some("nvidia"))],
        says: &[],
    },
    Case {
        values: "{}",
        classes: &[("other", "example.com/other", None)],
        says: &[],
    },
];

/// Said by helm once everything is rendered: the server has no schema.
const RENDERED: &str = "unable to build kubernetes objects";

pub(super) fn check(helm: &Helm) -> Result<()> {
    for case in CASES {
        let address = serve(case.classes.iter().map(class).collect())?;
        let server = format!("--kube-apiserver={address}");
        let said = helm.template(case.values, &["--dry-run=server", &server]);
        let said = said.err().map(|error| format!("{error:#}"));
        let said = said.context("helm must fail at an API server without a schema")?;
        let expected = if case.says.is_empty() {
            &[RENDERED]
        } else {
            case.says
        };
        for part in expected {
            ensure!(
                said.contains(part),
                "values {} beside {:?}: expected {part:?}, but: {said}",
                case.values,
                case.classes
            );
        }
    }
    Ok(())
}

/// Returns a class as the API server has it.
fn class(&(name, resource, release): &Class) -> Value {
    let annotations = release.map(|release| {
        json!({"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": "gpus"})
    });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"extendedResourceName": resource},
    })
}

/// Starts an API server with these classes, in a thread that ends with the process, and returns its
/// address.
fn serve(classes: Vec<Value>) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("http://{}", listener.local_addr()?);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes is helm's affair.
            let _ = answer(stream, &classes);
        }
    });
    Ok(address)
}

/// Answers one request and closes the connection.
fn answer(mut stream: TcpStream, classes: &[Value]) -> Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().context("no request")??;
    // The headers; requests of helm that are read here have no body.
    while !lines.next().context("half a request")??.is_empty() {}
    let path = request.split(' ').nth(1).context("no path")?;
    let path = path.split('?').next().unwrap_or(path);
    let group = "resource.k8s.io/v1";
    let body = match path {
        "/version" => Some(json!({"major": "1", "minor": "37", "gitVersion": "v1.37.1"})),
        "/api" => Some(json!({"kind": "APIVersions", "versions": ["v1"]})),
        "/api/v1" => {
            Some(json!({"kind": "APIResourceList", "groupVersion": "v1", "resources": []}))
        }
        "/apis" => {
            let version = json!({"groupVersion": group, "version": "v1"});
            let groups = json!([{"name": "resource.k8s.io", "versions": [version], "preferredVersion": version}]);
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        "/apis/resource.k8s.io/v1" => {
            let kind = json!({"name": "deviceclasses", "singularName": "deviceclass", "namespaced": false,
                "kind": "DeviceClass", "verbs": ["get", "list"]});
            Some(json!({"kind": "APIResourceList", "groupVersion": group, "resources": [kind]}))
        }
        "/apis/resource.k8s.io/v1/deviceclasses" => Some(
            json!({"kind": "DeviceClassList", "apiVersion": group, "metadata": {}, "items": classes}),
        ),
        _ => None,
    };
    let (status, body) = body.map_or_else(
        || {
            let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
            ("404 Not Found", gone)
        },
        |body| ("200 OK", body),
    );
    let body = body.to_string();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )?;
    Ok(())
}

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::*;

const DRIVER: &str = "dra.example.com";

fn text(value: &str) -> DeviceAttribute {
    DeviceAttribute {
        string: Some(value.to_owned()),
        ..DeviceAttribute::default()
    }
}

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(value),
        ..DeviceAttribute::default()
    }
}

fn version(value: &str) -> DeviceAttribute {
    DeviceAttribute {
        version: Some(value.to_owned()),
        ..DeviceAttribute::default()
    }
}

/// A device with one attribute of each type, some of them in other domains.
fn device() -> Device {
    let attributes: BTreeMap<String, DeviceAttribute> = [
        ("name", text("NVIDIA H100 80GB HBM3")),
        ("index", int(3)),
        ("numa", int(1)),
        (
            "healthy",
            DeviceAttribute {
                bool: Some(true),
                ..DeviceAttribute::default()
            },
        ),
        ("driverVersion", version("580.95.5")),
        ("resource.kubernetes.io/pcieRoot", text("pci0000:00")),
        ("dra.example.com/qualified", text("q")),
        (
            "ints",
            DeviceAttribute {
                ints: Some(vec![1, 2]),
                ..DeviceAttribute::default()
            },
        ),
        (
            "bools",
            DeviceAttribute {
                bools: Some(vec![true]),
                ..DeviceAttribute::default()
            },
        ),
        (
            "strings",
            DeviceAttribute {
                strings: Some(vec!["a".into(), "b".into()]),
                ..DeviceAttribute::default()
            },
        ),
        (
            "versions",
            DeviceAttribute {
                versions: Some(vec!["1.0.0".into(), "2.0.0".into()]),
                ..DeviceAttribute::default()
            },
        ),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let memory = DeviceCapacity {
        value: ApiQuantity("80Gi".to_owned()),
        ..DeviceCapacity::default()
    };
    Device {
        name: "gpu-0".to_owned(),
        attributes: Some(attributes),
        capacity: Some([("memory".to_owned(), memory)].into()),
        ..Device::default()
    }
}

/// The answer, or the error as text.
fn outcome(expression: &str) -> Result<bool, String> {
    let program = compile(expression).map_err(|e| e.to_string())?;
    eval(&program, DRIVER, &device(), true).map_err(|e| e.to_string())
}

#[track_caller]
fn holds(expression: &str) {
    assert_eq!(outcome(expression), Ok(true), "{expression}");
}

#[track_caller]
fn fails(expression: &str, part: &str) {
    let got = outcome(expression);
    assert!(
        got.as_ref().is_err_and(|e| e.contains(part)),
        "{expression}: {got:?}"
    );
}

#[test]
fn constants_true_and_false() {
    assert_eq!(outcome("true"), Ok(true));
    assert_eq!(outcome("false"), Ok(false));
}

#[test]
fn syntax_error() {
    fails("?!", "compilation failed: ERROR: <input>:1:1: Syntax error");
}

#[test]
fn type_error() {
    fails(
        r#"device.attributes["no-such-domain"]"#,
        "CEL result of type map could not be converted to bool",
    );
    fails("1", "CEL result of type int");
    fails(r#""a""#, "CEL result of type string");
    fails(
        r#"device.capacity["dra.example.com"].memory"#,
        "CEL result of type kubernetes.Quantity",
    );
}

#[test]
fn an_attribute_alone_compiles_and_must_be_bool_when_evaluated() {
    holds(r#"device.attributes["dra.example.com"].healthy"#);
    fails(
        r#"device.attributes["dra.example.com"].index"#,
        "CEL result of type int could not be converted to bool",
    );
}

#[test]
fn list_result_type_causes_match_error() {
    fails(
        r#"device.attributes["dra.example.com"].ints"#,
        "CEL result of type list could not be converted to bool",
    );
}

#[test]
fn runtime_error_lookup_identifier_and_map() {
    for expression in [
        r#"device.attributes["no-such-domain"].noSuchAttr.isGreaterThan(quantity("0"))"#,
        r#"device.attributes["no-such-domain"]["noSuchAttr"].isGreaterThan(quantity("0"))"#,
        r#"device.attributes["dra.example.com"].noSuchAttr == 1"#,
        r#"device.capacity["dra.example.com"].noSuchAttr == quantity("0")"#,
    ] {
        assert_eq!(
            outcome(expression),
            Err("no such key: noSuchAttr".to_owned()),
            "{expression}"
        );
    }
}

#[test]
fn domain_check_positive_and_negative() {
    holds(r#""dra.example.com" in device.attributes"#);
    holds(r#"!("no-such-domain" in device.attributes)"#);
    holds(r#"!has(device.attributes["no-such-domain"].foo)"#);
    holds(r#"device.attributes["no-such-domain"].size() == 0"#);
}

#[test]
fn driver_name_and_driver_name_qualifier() {
    holds(r#"device.driver == "dra.example.com""#);
    holds(r#"device.attributes["dra.example.com"].index == 3"#);
    holds(r#"device.attributes["dra.example.com"]["index"] == 3"#);
    holds("device.attributes[device.driver].index == 3");
    holds(r#"device.attributes["dra.example.com"].qualified == "q""#);
}

#[test]
fn qualified_attribute_name() {
    holds(r#"device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:00""#);
    fails(
        r#"device.attributes["dra.example.com"].pcieRoot == """#,
        "no such key: pcieRoot",
    );
}

#[test]
fn bind() {
    holds(r#"cel.bind(d, device.attributes["dra.example.com"], d.index == 3 && d.healthy)"#);
    holds(
        r#"cel.bind(a, device.attributes["dra.example.com"], cel.bind(b, a.index, [1, 2, 3].exists(x, x == b)))"#,
    );
}

#[test]
fn bool_int_string_and_version_attributes() {
    holds(r#"device.attributes["dra.example.com"].healthy == true"#);
    holds(r#"device.attributes["dra.example.com"].index + 1 == 4"#);
    holds(r#"device.attributes["dra.example.com"].name.startsWith("NVIDIA")"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion.isGreaterThan(semver("550.0.0"))"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion.isLessThan(semver("v581", true))"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion == semver("580.95.5")"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion.major() == 580"#);
    holds(
        r#"semver("1.2.3").compareTo(semver("1.2.4")) == -1 && !isSemver("1") && isSemver("1", true)"#,
    );
}

#[test]
fn a_version_compared_with_a_text_is_an_error_and_not_false() {
    for expression in [
        r#"device.attributes["dra.example.com"].driverVersion == "580.95.5""#,
        r#"["driverVersion"].exists(id, device.attributes["dra.example.com"][id] == "580.95.5")"#,
        r#"cel.bind(v, device.attributes["dra.example.com"].driverVersion, v == "580.95.5")"#,
    ] {
        assert_eq!(
            outcome(expression),
            Err("no such overload: _==_(kubernetes.Semver, string)".to_owned()),
            "{expression}"
        );
    }
    // As in Kubernetes, where the error of the comparison becomes a difference.
    holds(r#"device.attributes["dra.example.com"].driverVersion != "580.95.5""#);
    fails(
        r#"device.attributes["dra.example.com"].driverVersion >= "580.95.5""#,
        "no such overload: _>=_(kubernetes.Semver, string)",
    );
    holds(r#"device.attributes["dra.example.com"].name != 1"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion != null"#);
}

#[test]
fn version_v() {
    fails(
        r#"semver("v1.2.3").major() == 1"#,
        "is not a semantic version",
    );
}

#[test]
fn quantity() {
    holds(r#"device.capacity["dra.example.com"].memory.compareTo(quantity("40Gi")) > 0"#);
    holds(r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("79Gi"))"#);
    holds(r#"device.capacity["dra.example.com"].memory == quantity("81920Mi")"#);
    holds(
        r#"quantity("1k").add(quantity("24")).sub(24).asInteger() == 1000 && sign(quantity("-1")) == -1"#,
    );
    holds(
        r#"isQuantity("1.5Gi") && !isQuantity("1.5GB") && quantity("1500m").asApproximateFloat() == 1.5"#,
    );
    holds(r#"!quantity("100m").isInteger()"#);
    fails(
        r#"quantity("100m").asInteger() == 0"#,
        "cannot convert value to integer",
    );
    fails(r#"sign(quantity("10GB")) == 1"#, "is not a quantity");
}

#[test]
fn macros_exist_on_map_keys_and_lists() {
    holds(r#"["foo", "index"].exists(x, x in device.attributes["dra.example.com"])"#);
    holds(r#"device.attributes.exists(d, d == "resource.kubernetes.io")"#);
    holds(r#"device.attributes["dra.example.com"].exists_one(id, id == "name")"#);
    holds(r"device.attributes.all(d, device.attributes[d].size() > 0)");
    holds(r#"device.attributes["dra.example.com"].strings.exists(s, s == "b")"#);
    holds(r#"device.attributes["dra.example.com"].versions.exists(v, v.major() == 2)"#);
    holds(r#"["a", "b"].map(x, x + "c").filter(x, x == "bc").size() == 1"#);
}

#[test]
fn list_of_bool_int_string_and_semver() {
    holds(r#"device.attributes["dra.example.com"].ints == [1, 2]"#);
    holds(r#"device.attributes["dra.example.com"].bools[0]"#);
    holds(r#""a" in device.attributes["dra.example.com"].strings"#);
    holds(r#"semver("2.0.0") in device.attributes["dra.example.com"].versions"#);
}

#[test]
fn includes_function_on_scalar_and_list() {
    holds(r#"device.attributes["dra.example.com"].ints.includes(2)"#);
    holds(r#"!device.attributes["dra.example.com"].strings.includes("c")"#);
    holds(r#"device.attributes["dra.example.com"].index.includes(3)"#);
    holds(r#"!device.attributes["dra.example.com"].name.includes("c")"#);
    fails("lists.range(49).includes(1)", "more than 48");
}

#[test]
fn two_variable_comprehensions() {
    holds(r#"device.attributes["dra.example.com"].exists(id, v, id == "index" && v == 3)"#);
    holds(r#"["a", "b"].all(i, v, i < 2 && v != "c")"#);
    holds(r#"["a", "b"].existsOne(i, v, v == "b" && i == 1)"#);
    holds(r#"["a", "b"].transformList(i, v, i > 0, v + "!") == ["b!"]"#);
    holds(r#"{"a": 1}.transformMap(k, v, v + 1)["a"] == 2"#);
    holds(r#"["x", "y"].transformMapEntry(i, v, {v: i}) == {"x": 0, "y": 1}"#);
    holds(r"[[1, 2], [3]].exists(i, v, v.exists(j, w, i == 0 && j == 1 && w == 2))");
    fails(
        r#"["x", "x"].transformMapEntry(i, v, {v: i}).size() == 1"#,
        "key already exists",
    );
    fails(r#"["x"].all(i, i, true)"#, "duplicate variable name: i");
}

#[test]
fn optionals_give_a_default() {
    holds(r#"device.attributes["dra.example.com"].?noSuchAttr.orValue("none") == "none""#);
    holds(r#"device.attributes["dra.example.com"].?index.orValue(0) == 3"#);
    holds(r#"device.attributes["no-such-domain"].?foo.orValue(false) == false"#);
    holds(r#"!device.attributes[?"dra.example.com"].?foo.hasValue()"#);
    holds(r#"device.attributes["dra.example.com"].?index.optMap(i, i * 2).orValue(0) == 6"#);
    holds(r#"[1, 2].last().value() == 2 && !["a"].filter(x, x == "b").first().hasValue()"#);
}

#[test]
fn and_or_absorb_errors_of_the_other_side() {
    holds(r#"device.attributes["dra.example.com"].noSuchAttr == 1 || true"#);
    holds(r#"true || device.attributes["dra.example.com"].noSuchAttr == 1"#);
    assert_eq!(
        outcome(r#"device.attributes["dra.example.com"].noSuchAttr == 1 && false"#),
        Ok(false)
    );
    fails(
        r#"device.attributes["dra.example.com"].noSuchAttr == 1 && true"#,
        "no such key: noSuchAttr",
    );
}

#[test]
fn strings_lists_sets_and_regexes() {
    holds(r#"device.attributes["dra.example.com"].name.lowerAscii().matches("h100.*hbm\\d$")"#);
    holds(r#"device.attributes["dra.example.com"].name.matches("(?i)nvidia h\\d{3}")"#);
    holds(r#""a-b-c".split("-").size() == 3 && "a,b".split(",", 1)[0] == "a,b""#);
    holds(
        r#""H100 and A30".find("[AH][0-9]+") == "H100" && "H100 A30".findAll("[AH][0-9]+").size() == 2"#,
    );
    holds(
        r#"["b", "a"].sort() == ["a", "b"] && [1, 1].distinct() == [1] && ["a", "b"].join("-") == "a-b""#,
    );
    holds(r"[1, 2, 3].sum() == 6 && [3, 1].min() == 1 && [3, 1].max() == 3 && ![3, 1].isSorted()");
    holds(r"[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2 && [1].indexOf(5) == -1");
    holds(
        r"sets.contains([1, 2], [2]) && sets.equivalent([1, 1], [1]) && !sets.intersects([1], [2])",
    );
    fails(r#"device.driver.matches("a(")"#, "regex parse error");
    fails(r#"device.driver.matches("a" + "(")"#, "regex");
}

#[test]
fn many_conditions_in_one_expression() {
    let one = r#"device.attributes["dra.example.com"].index == 3"#;
    holds(&vec![one; 100].join(" && "));
}

#[test]
fn split_attribute_and_regexp_attribute() {
    holds(r#"device.attributes["dra.example.com"].name.split(" ").exists(w, w == "H100")"#);
    holds(r#"device.attributes["dra.example.com"].name.matches("^NVIDIA H100")"#);
}

#[test]
fn check_capacity_domains_and_ids() {
    holds(r#"device.capacity.exists_one(d, d == "dra.example.com")"#);
    holds(r#"device.capacity["dra.example.com"].exists(id, id == "memory")"#);
    holds(r#"device.capacity.size() == 1 && !("x" in device.capacity)"#);
}

#[test]
fn allow_multiple_allocations_default_false_and_set() {
    holds("device.allowMultipleAllocations == false");
    let program = compile("device.allowMultipleAllocations").unwrap();
    let shared = Device {
        allow_multiple_allocations: Some(true),
        ..device()
    };
    assert_eq!(eval(&program, DRIVER, &shared, true), Ok(true));
}

#[test]
fn numbers_of_different_types_compare_by_value() {
    holds("1 < 1.5 && 2u > 1 && device.attributes[device.driver].index >= 2.5");
}

#[test]
fn an_expression_over_the_length_limit_is_refused() {
    let long = format!("device.driver == \"{}\"", "x".repeat(MAX_EXPRESSION_LENGTH));
    assert_eq!(
        compile(&long).map(drop),
        Err(CelError::TooLong { length: long.len() })
    );
    let rest = "true".len() + " || ".len();
    let fits = format!(
        "true || {}",
        "true".to_owned() + &" ".repeat(MAX_EXPRESSION_LENGTH - rest - 4)
    );
    assert!(compile(&fits).is_ok());
}

/// The real scheduler's answers, on a device like that of [`as_upstream`]; written by `upstream/`.
/// A line that begins with `differs` is in the list of `docs/contributing/allocator.md`.
const EXPRESSIONS: &str = include_str!("expressions.txt");

fn as_upstream() -> Device {
    let text = |value: &str| DeviceAttribute {
        string: Some(value.to_owned()),
        ..Default::default()
    };
    let attributes = [
        ("type", text("gpu")),
        (
            "numa",
            DeviceAttribute {
                int: Some(1),
                ..Default::default()
            },
        ),
        (
            "healthy",
            DeviceAttribute {
                bool: Some(true),
                ..Default::default()
            },
        ),
        ("model", text("NVIDIA H100 80GB")),
        (
            "driverVersion",
            DeviceAttribute {
                version: Some("580.95.5".to_owned()),
                ..Default::default()
            },
        ),
        ("gpu.divvy.dev/qual", text("q")),
        ("resource.kubernetes.io/pcieRoot", text("pci0")),
    ];
    let capacity = [("memory", "80Gi"), ("cores", "100")].map(|(name, value)| {
        (
            name.to_owned(),
            DeviceCapacity {
                value: ApiQuantity(value.to_owned()),
                ..Default::default()
            },
        )
    });
    Device {
        attributes: Some(
            attributes
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        ),
        capacity: Some(capacity.into()),
        ..Device::default()
    }
}

#[test]
fn expressions_give_what_they_give_in_the_real_scheduler() {
    let device = as_upstream();
    let mut compared = 0;
    for line in EXPRESSIONS.lines() {
        let (expected, expression) = line.split_once(' ').unwrap();
        let got =
            compile(expression).and_then(|program| eval(&program, "gpu.divvy.dev", &device, true));
        let got = match &got {
            Ok(true) => "fits",
            Ok(false) => "none",
            Err(CelError::Offline(_)) => "unknown",
            Err(_) => "error",
        };
        match expected {
            "differs" => continue,
            _ => assert_eq!(got, expected, "{expression}"),
        }
        compared += 1;
    }
    assert!(compared > 120, "{compared}");
}

#[test]
fn what_cannot_be_evaluated_offline_is_named() {
    for (expression, why) in [
        ("duration('1h') > duration('30m')", "it uses `duration`"),
        ("true || isIP(device.driver)", "it uses `isIP`"),
        (
            "!format.named('uuid').value().validate(device.driver).hasValue()",
            "it uses `format`",
        ),
    ] {
        assert_eq!(
            compile(expression).map(drop),
            Err(CelError::Offline(why.to_owned())),
            "{expression}"
        );
    }
    fails(
        "duration('1h') > duration('30m')",
        "unknown: divvy cannot evaluate this selector offline because it uses `duration`",
    );
}

#[test]
fn what_the_api_server_refuses_for_its_types_gives_no_answer() {
    for (expression, problem) in [
        (
            "devices.driver == \"a\"",
            "undeclared reference to 'devices'",
        ),
        ("device.nodeName == \"a\"", "undefined field 'nodeName'"),
        (
            "device.driver.lower() == \"a\"",
            "undeclared reference to 'lower'",
        ),
        ("nope(1)", "undeclared reference to 'nope'"),
        (
            "device.driver == 1",
            "found no matching overload for '_==_' applied to '(string, int)'",
        ),
        ("device.driver && true", "no such overload"),
        ("!device.driver", "no such overload"),
        (
            r#"device.capacity["dra.example.com"].memory > quantity("1")"#,
            "no such overload",
        ),
        (
            r#"device.capacity["dra.example.com"].memory.compareTo("1") > 0"#,
            "no such overload",
        ),
        ("device.driver.matches(1)", "no such overload"),
        (
            "[1, \"a\"].size() == 2",
            "expected type 'int' but found 'string'",
        ),
        (
            r#"["x", device.attributes["a"].b].size() == 2"#,
            "expected type 'string' but found 'dyn'; an attribute can be of any type: compare it",
        ),
        (
            "device.driver.exists(x, true)",
            "got 'string', want 'iterable'",
        ),
        ("device.attributes[1].x == 1", "no such overload"),
    ] {
        fails(expression, problem);
    }
}

/// Each is answered or refused.
#[test]
fn the_longest_chains_that_fit_never_overflow_the_stack() {
    let fill = |start: &str, term: &str, end: &str| {
        let times = (MAX_EXPRESSION_LENGTH - start.len() - end.len()) / term.len();
        format!("{start}{}{end}", term.repeat(times))
    };
    for expression in [
        fill("true", "&&true", ""),
        fill("0", "+1", " > 0"),
        fill("", "!", "true"),
        fill("device", ".a", ""),
        fill("[0]", "[0]", ""),
        fill("", "[", "]"),
        fill("", "[1,", ""),
        fill("", "size(1,", ""),
        fill("", "{1:true&&", ""),
        fill("", "!(true&&", ""),
        "(".repeat(90) + "true" + &")".repeat(90),
        "[".repeat(90) + &"]".repeat(90) + ".size() == 1",
        fill("device.driver == \"\"", "||size([1])>1", "|| true"),
        fill("true", "?true:true", ""),
    ] {
        // Whatever the answer is: it comes.
        let got = outcome(&expression);
        assert!(
            got == Ok(true)
                || got
                    .as_ref()
                    .is_err_and(|e| e.contains("nests too deeply") || e.contains("Syntax error")),
            "{got:?}"
        );
    }
}

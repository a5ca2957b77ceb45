use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use super::*;

const DRIVER: &str = "dra.example.com";

fn text(value: &str) -> DeviceAttribute {
    DeviceAttribute { string: Some(value.to_owned()), ..DeviceAttribute::default() }
}

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute { int: Some(value), ..DeviceAttribute::default() }
}

fn version(value: &str) -> DeviceAttribute {
    DeviceAttribute { version: Some(value.to_owned()), ..DeviceAttribute::default() }
}

/// A device with one attribute of each type, some of them in other domains.
fn device() -> Device {
    let attributes: BTreeMap<String, DeviceAttribute> = [
        ("name", text("NVIDIA H100 80GB HBM3")),
        ("index", int(3)),
        ("numa", int(1)),
        ("healthy", DeviceAttribute { bool: Some(true), ..DeviceAttribute::default() }),
        ("driverVersion", version("580.95.5")),
        ("resource.kubernetes.io/pcieRoot", text("pci0000:00")),
        ("dra.example.com/qualified", text("q")),
        ("ints", DeviceAttribute { ints: Some(vec![1, 2]), ..DeviceAttribute::default() }),
        ("bools", DeviceAttribute { bools: Some(vec![true]), ..DeviceAttribute::default() }),
        (
            "strings",
            DeviceAttribute { strings: Some(vec!["a".into(), "b".into()]), ..DeviceAttribute::default() },
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
    let memory = DeviceCapacity { value: ApiQuantity("80Gi".to_owned()), ..DeviceCapacity::default() };
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
    eval(&program, DRIVER, &device()).map_err(|e| e.to_string())
}

#[track_caller]
fn holds(expression: &str) {
    assert_eq!(outcome(expression), Ok(true), "{expression}");
}

#[track_caller]
fn fails(expression: &str, part: &str) {
    let got = outcome(expression);
    assert!(got.as_ref().is_err_and(|e| e.contains(part)), "{expression}: {got:?}");
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
        "must evaluate to bool or the unknown type, not map(string, any)",
    );
    fails("1", "must evaluate to bool or the unknown type, not int");
    fails(r#""a""#, "not string");
    fails(r#"device.capacity["dra.example.com"].memory"#, "not kubernetes.Quantity");
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
        assert_eq!(outcome(expression), Err("no such key: noSuchAttr".to_owned()), "{expression}");
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
    fails(r#"device.attributes["dra.example.com"].pcieRoot == """#, "no such key: pcieRoot");
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
    holds(r#"semver("1.2.3").compareTo(semver("1.2.4")) == -1 && !isSemver("1") && isSemver("1", true)"#);
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
    fails(
        r#"device.attributes["dra.example.com"].driverVersion != "580.95.5""#,
        "no such overload: _!=_(kubernetes.Semver, string)",
    );
    fails(
        r#"device.attributes["dra.example.com"].driverVersion >= "580.95.5""#,
        "no such overload: _>=_(kubernetes.Semver, string)",
    );
    holds(r#"device.attributes["dra.example.com"].name != 1"#);
    holds(r#"device.attributes["dra.example.com"].driverVersion != null"#);
}

#[test]
fn version_v() {
    fails(r#"semver("v1.2.3").major() == 1"#, "is not a semantic version");
}

#[test]
fn quantity() {
    holds(r#"device.capacity["dra.example.com"].memory.compareTo(quantity("40Gi")) > 0"#);
    holds(r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("79Gi"))"#);
    holds(r#"device.capacity["dra.example.com"].memory == quantity("81920Mi")"#);
    holds(r#"quantity("1k").add(quantity("24")).sub(24).asInteger() == 1000 && quantity("-1").sign() == -1"#);
    holds(r#"isQuantity("1.5Gi") && !isQuantity("1.5GB") && quantity("1500m").asApproximateFloat() == 1.5"#);
    holds(r#"!quantity("100m").isInteger()"#);
    fails(r#"quantity("100m").asInteger() == 0"#, "cannot convert value to integer");
    fails(r#"quantity("10GB").sign() == 1"#, "is not a quantity");
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
    fails(r#"["x", "x"].transformMapEntry(i, v, {v: i}).size() == 1"#, "key already exists");
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
    assert_eq!(outcome(r#"device.attributes["dra.example.com"].noSuchAttr == 1 && false"#), Ok(false));
    fails(r#"device.attributes["dra.example.com"].noSuchAttr == 1 && true"#, "no such key: noSuchAttr");
}

#[test]
fn strings_lists_sets_and_regexes() {
    holds(r#"device.attributes["dra.example.com"].name.lowerAscii().matches("h100.*hbm\\d$")"#);
    holds(r#"device.attributes["dra.example.com"].name.matches("(?i)nvidia h\\d{3}")"#);
    holds(r#""a-b-c".split("-").size() == 3 && "a,b".split(",", 1)[0] == "a,b""#);
    holds(r#""H100 and A30".find("[AH][0-9]+") == "H100" && "H100 A30".findAll("[AH][0-9]+").size() == 2"#);
    holds(r#"["b", "a"].sort() == ["a", "b"] && [1, 1].distinct() == [1] && ["a", "b"].join("-") == "a-b""#);
    holds(r"[1, 2, 3].sum() == 6 && [3, 1].min() == 1 && [3, 1].max() == 3 && ![3, 1].isSorted()");
    holds(r"[1, 2, 1].indexOf(1) == 0 && [1, 2, 1].lastIndexOf(1) == 2 && [1].indexOf(5) == -1");
    holds(r"sets.contains([1, 2], [2]) && sets.equivalent([1, 1], [1]) && !sets.intersects([1], [2])");
    fails(
        r#"device.driver.matches("a(")"#,
        "compilation failed: ERROR: <input>:1:23: invalid matches argument",
    );
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
    let shared = Device { allow_multiple_allocations: Some(true), ..device() };
    assert_eq!(eval(&program, DRIVER, &shared), Ok(true));
}

#[test]
fn numbers_of_different_types_compare_by_value() {
    holds("1 < 1.5 && 2u > 1 && device.attributes[device.driver].index >= 2.5");
}

#[test]
fn an_expression_over_the_length_limit_is_refused() {
    let long = format!("device.driver == \"{}\"", "x".repeat(MAX_EXPRESSION_LENGTH));
    assert_eq!(compile(&long).map(drop), Err(CelError::TooLong { length: long.len() }));
    let rest = "true".len() + " || ".len();
    let fits = format!("true || {}", "true".to_owned() + &" ".repeat(MAX_EXPRESSION_LENGTH - rest - 4));
    assert!(compile(&fits).is_ok());
}

#[test]
fn what_can_never_work_is_refused_when_compiling() {
    for (expression, problem) in [
        ("devices.driver == \"a\"", "undeclared reference to 'devices' (in container '')"),
        ("device.nodeName == \"a\"", "undefined field 'nodeName'"),
        ("device.driver.lower() == \"a\"", "undeclared reference to 'lower' (in container '')"),
        ("nope(1)", "undeclared reference to 'nope' (in container '')"),
        ("device.driver == 1", "found no matching overload for '_==_' applied to '(string, int)'"),
        ("device.driver && true", "found no matching overload for '_&&_' applied to '(string, bool)'"),
        ("!device.driver", "found no matching overload for '!_' applied to '(string)'"),
        (
            r#"device.capacity["a"].memory > quantity("1")"#,
            "found no matching overload for '_>_' applied to '(kubernetes.Quantity, kubernetes.Quantity)'",
        ),
        (
            r#"device.capacity["a"].memory.compareTo("1") > 0"#,
            "found no matching overload for 'compareTo' applied to 'kubernetes.Quantity.(string)'",
        ),
        ("device.driver.matches(1)", "found no matching overload for 'matches' applied to 'string.(int)'"),
        ("[1, \"a\"].size() == 2", "expected type 'int' but found 'string'"),
        (
            "device.driver.exists(x, true)",
            "expression of type 'string' cannot be range of a comprehension (must be list, map, or dynamic)",
        ),
        ("device.attributes[1].x == 1", "found no matching overload for '_[_]'"),
        ("isIP(device.driver)", "Kubernetes has it, this evaluator does not support it yet"),
    ] {
        fails(expression, problem);
    }
}

#[test]
fn a_compile_error_shows_the_place() {
    assert_eq!(
        compile("true &&\n nope").map(drop),
        Err(CelError::Compile(
            "ERROR: <input>:2:2: undeclared reference to 'nope' (in container '')\n |  nope\n | .^"
                .to_owned()
        ))
    );
}

#[test]
fn the_longest_chains_that_fit_are_answered_or_refused_and_never_overflow_the_stack() {
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
                || got.as_ref().is_err_and(|e| e.contains("recursion") || e.contains("Syntax error")),
            "{got:?}"
        );
    }
}

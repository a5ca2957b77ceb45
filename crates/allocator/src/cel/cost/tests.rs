use crate::cel::{CelError, check};

fn cost(expression: &str) -> u64 {
    let program = crate::cel::ENV.compile(expression).unwrap();
    super::estimate(program.expression())
}

/// Figures of `compile_test.go` of k8s.io/dynamic-resource-allocation v0.37.1, without list
/// attributes.
#[test]
fn costs_are_those_of_the_api_server() {
    let ten = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]";
    let nested = ["x", "y", "z", "z2", "z3", "z4", "z5"]
        .into_iter()
        .rev()
        .fold("int('1'.find('[0-9]*')) < 100".to_owned(), |inner, name| {
            format!("{ten}.all({name}, {inner})")
        });
    let a = r#"device.attributes["dra.example.com"]"#;
    let c = r#"device.capacity["dra.example.com"]"#;
    let all = format!(
        r#"{c}.quantity.isGreaterThan(quantity("1Ki")) && {a}.bool && {a}.int > 0 && {a}.string == "fish" &&
{a}.version.isGreaterThan(semver("0.0.1")) && {c}["quantity"].isGreaterThan(quantity("1Ki")) && {a}["bool"] &&
{a}["int"] > 0 && {a}["string"] == "fish" && {a}["version"].isGreaterThan(semver("0.0.1"))"#
    );
    for (expression, expected) in [
        ("true".to_owned(), 0),
        (format!(r#"{a}.noSuchAttr.isGreaterThan(quantity("0"))"#), 6),
        (r#""dra.example.com" in device.attributes"#.to_owned(), 3),
        (r#"device.driver == """#.to_owned(), 2),
        (r#"device.driver == "dra.example.com""#.to_owned(), 4),
        (format!("{a}.name"), 4),
        (format!("cel.bind(dra, {a}, dra.name)"), 15),
        (format!("{a}.name > 0"), 5),
        (format!(r#"{a}.name == "fish""#), 5),
        (
            format!(
                r#"{a}.name.isGreaterThan(semver("v0.0.1", true)) && isSemver("v1.0.0", true)"#
            ),
            7,
        ),
        (
            format!(r#""name" in {c} && {c}.name.isGreaterThan(quantity("1Ki"))"#),
            10,
        ),
        (
            format!(r#"!("name" in {c}) || {c}.name.isGreaterThan(quantity("1Ki"))"#),
            11,
        ),
        (all, 52),
        (format!("{a}.a && {a}.b && {a}.c"), 12),
        (
            r#"device.attributes.exists_one(x, x == "dra.example.com")"#.to_owned(),
            164,
        ),
        (format!(r#"{a}.exists_one(x, x == "services")"#), 133),
        (format!(r#"{a}.services.split("example").size() >= 2"#), 19),
        (format!(r#"{a}.services.matches("[^a]?sym")"#), 18),
        (format!(r#"{c}.exists_one(x, x == "memory")"#), 133),
        (nested, 85_555_551),
        ("device.allowMultipleAllocations == true".to_owned(), 3),
    ] {
        assert_eq!(cost(&expression), expected, "{expression}");
    }
}

#[test]
fn an_expression_over_the_limit_is_refused_in_the_servers_words() {
    let all = r"device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, device.attributes.all(d, a == b && c == d))))";
    let error = check(all).unwrap_err();
    assert!(matches!(error, CelError::TooCostly { .. }), "{error}");
    assert!(
        error
            .to_string()
            .starts_with("too complex, exceeds cost limit"),
        "{error}"
    );
    check("device.attributes.all(a, device.attributes.all(b, a == b || a != b))").unwrap();
}

/// Quantities and versions are compared by `compareTo`: an operator is no question of cost.
#[test]
fn what_has_no_overload_is_not_called_too_complex() {
    for expression in [
        r#"device.capacity["gpu.divvy.dev"].memory >= quantity("40Gi")"#,
        r#"device.capacity["gpu.divvy.dev"].memory >= "40Gi""#,
        r#"semver("1.0.0") < semver("2.0.0")"#,
    ] {
        check(expression).unwrap();
    }
}

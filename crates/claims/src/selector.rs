//! The selectors of requests and DeviceClasses, where a few values of their device are known:
//! whether an expression can still be true.
//!
//! The scheduler has evaluated it in full; a node asks only about the values that have changed
//! since. So this reads the logical operators and the comparisons with those values, and holds
//! every other part for possible. The node plugin does without a CEL parser: that of the crate
//! `cel` adds a megabyte to it.

/// Values of a device by the text that reads them in an expression, without white space and with
/// double quotes.
pub type Known<'a> = [(String, Value<'a>)];

/// Value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    Text(&'a str),
    Int(i64),
    /// The same, or no such attribute. An expression that reads one which is not there does not
    /// hold by that.
    IntIfThere(i64),
}

/// Depth of nested operators beyond which an expression is not read.
const DEPTH: usize = 64;
/// Token of a string that is not compared: with escapes, or in three quotes.
const OTHER_STRING: &str = "'";
/// Operators of two characters.
const PAIRS: [&str; 6] = ["&&", "||", "==", "!=", "<=", ">="];
/// Operators that compare two values.
const RELATIONS: [&str; 7] = ["==", "!=", "<", "<=", ">", ">=", "in"];

/// Value of a part of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Truth {
    True,
    False,
    Unknown,
}

impl From<bool> for Truth {
    fn from(value: bool) -> Self {
        if value { Self::True } else { Self::False }
    }
}

impl Truth {
    fn not(self) -> Self {
        match self {
            Self::True => Self::False,
            Self::False => Self::True,
            Self::Unknown => self,
        }
    }

    /// Returns the value of parts with `||` between them, or with `&&` where `decisive` is
    /// [`Truth::False`]: the decisive value of a part is that of all, whatever the others are (CEL
    /// specification, "Logical Operators").
    fn join(parts: &[Self], decisive: Self) -> Self {
        [decisive, Self::Unknown]
            .into_iter()
            .find(|value| parts.contains(value))
            .unwrap_or_else(|| decisive.not())
    }
}

/// Side of a comparison.
enum Operand<'a> {
    Value(Value<'a>),
    List(Vec<Value<'a>>),
    Unknown,
}

/// Returns whether a CEL expression can be true for a device of which these values are known. An
/// expression that is not understood can.
pub fn can_hold(expression: &str, known: &Known<'_>) -> bool {
    let Some(tokens) = tokens(expression) else {
        return true;
    };
    truth(&tokens, known, DEPTH) != Truth::False
}

/// Splits an expression into words, operators and strings without its comments. A string is in
/// double quotes, or [`OTHER_STRING`]. `None` where one does not end.
fn tokens(expression: &str) -> Option<Vec<String>> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = expression.trim_start();
    let mut found: Vec<String> = Vec::new();
    while let Some(first) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest.split_once('\n').map_or("", |(_, next)| next);
            rest = rest.trim_start();
            continue;
        }
        let length = if matches!(first, '"' | '\'') {
            let is_raw = found.last().is_some_and(|before| is_raw(before));
            string_length(rest, first, is_raw)?
        } else if is_word(first) {
            rest.find(|c| !is_word(c)).unwrap_or(rest.len())
        } else if PAIRS.iter().any(|pair| rest.starts_with(pair)) {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at_checked(length)?;
        found.push(if matches!(first, '"' | '\'') {
            plain(token).map_or_else(|| OTHER_STRING.to_owned(), |text| format!("\"{text}\""))
        } else {
            token.to_owned()
        });
        rest = after.trim_start();
    }
    Some(found)
}

/// Returns whether a word before a string says that its backslashes are no escapes.
fn is_raw(before: &str) -> bool {
    ["r", "br", "rb"].contains(&before.to_lowercase().as_str())
}

/// Returns the length of the string that a text begins with, with its quotes: one or three.
fn string_length(text: &str, quote: char, is_raw: bool) -> Option<usize> {
    let three = quote.to_string().repeat(3);
    let end = if text.starts_with(&three) {
        three.as_str()
    } else {
        three.get(..1)?
    };
    let mut at = end.len();
    loop {
        let rest = text.get(at..)?;
        if rest.starts_with(end) {
            return Some(at + end.len());
        }
        let mut characters = rest.chars();
        if characters.next()? == '\\' && !is_raw {
            characters.next()?;
        }
        at = text.len() - characters.as_str().len();
    }
}

/// Returns the text of a string in single quotes of either kind. `None` for one with escapes or in
/// three quotes.
fn plain(string: &str) -> Option<&str> {
    let quote = string.get(..1)?;
    let text = string.strip_prefix(quote)?.strip_suffix(quote)?;
    let is_plain = !text.contains('\\') && !text.contains(quote);
    is_plain.then_some(text)
}

/// Returns the value of a part of an expression, as far as it follows from the known values.
fn truth(part: &[String], known: &Known<'_>, depth: usize) -> Truth {
    let Some(depth) = depth.checked_sub(1) else {
        return Truth::Unknown;
    };
    let outer = outer(part);
    let is = |at: usize, token: &str| part.get(at).is_some_and(|t| t == token);
    let split = |operator: &str| {
        let at = outer.iter().copied().filter(|at| is(*at, operator));
        let ends: Vec<_> = at.chain([part.len()]).collect();
        let starts = [0].into_iter().chain(ends.iter().map(|end| end + 1));
        let ranges = starts.zip(&ends);
        let parts = ranges.map(|(start, end)| part.get(start..*end).unwrap_or_default());
        parts.collect::<Vec<_>>()
    };
    // From the operator that binds least to the one that binds most.
    let is_optional = |at: usize| at.checked_sub(1).is_some_and(|before| is(before, "."));
    if outer.iter().any(|at| is(*at, "?") && !is_optional(*at)) {
        return Truth::Unknown;
    }
    for (operator, decisive) in [("||", Truth::True), ("&&", Truth::False)] {
        let parts = split(operator);
        if parts.len() > 1 {
            let values = parts.into_iter().map(|part| truth(part, known, depth));
            return Truth::join(&values.collect::<Vec<_>>(), decisive);
        }
    }
    let mut relations = outer.iter().copied().filter(|at| {
        let token = part.get(*at).map_or("", String::as_str);
        RELATIONS.contains(&token)
    });
    match (relations.next(), relations.next()) {
        (Some(at), None) => {
            let (left, right) = (part.get(..at), part.get(at + 1..));
            let operator = part.get(at).map_or("", String::as_str);
            compare(
                left.unwrap_or_default(),
                operator,
                right.unwrap_or_default(),
                known,
            )
        }
        (Some(_), Some(_)) => Truth::Unknown,
        (None, _) => match part {
            [not, rest @ ..] if not == "!" => truth(rest, known, depth).not(),
            [open, inside @ .., close] if open == "(" && close == ")" && outer.len() == 2 => {
                truth(inside, known, depth)
            }
            [has, open, read @ .., close] if has == "has" && open == "(" && close == ")" => {
                present(&path(read), known)
            }
            _ => Truth::Unknown,
        },
    }
}

/// Returns the places of the tokens of a part that are in no brackets but those themselves.
fn outer(part: &[String]) -> Vec<usize> {
    let mut depth = 0_usize;
    let mut found = Vec::new();
    for (at, token) in part.iter().enumerate() {
        let (opens, closes) = (
            matches!(token.as_str(), "(" | "[" | "{"),
            matches!(token.as_str(), ")" | "]" | "}"),
        );
        depth = depth.saturating_sub(usize::from(closes));
        if depth == 0 {
            found.push(at);
        }
        depth += usize::from(opens);
    }
    found
}

fn compare(left: &[String], operator: &str, right: &[String], known: &Known<'_>) -> Truth {
    use Value::{Int, Text};
    let (left, right) = (operand(left, known), (operand(right, known), right));
    match (left, operator, right) {
        (Operand::Value(left), "==", (Operand::Value(right), _)) => Truth::from(left == right),
        (Operand::Value(left), "!=", (Operand::Value(right), _)) => Truth::from(left != right),
        (Operand::Value(Int(left)), _, (Operand::Value(Int(right)), _)) => match operator {
            "<" => Truth::from(left < right),
            "<=" => Truth::from(left <= right),
            ">" => Truth::from(left > right),
            ">=" => Truth::from(left >= right),
            _ => Truth::Unknown,
        },
        (Operand::Value(value), "in", (Operand::List(list), _)) => {
            Truth::from(list.contains(&value))
        }
        (Operand::Value(Text(name)), "in", (Operand::Unknown, map)) => {
            present(&format!("{}.{name}", path(map)), known)
        }
        _ => Truth::Unknown,
    }
}

fn operand<'a>(part: &'a [String], known: &Known<'a>) -> Operand<'a> {
    if let [open, items @ .., close] = part
        && open == "["
        && close == "]"
    {
        let items = items.split(|token| token == ",");
        let items = items.map(literal).collect::<Option<_>>();
        return items.map_or(Operand::Unknown, Operand::List);
    }
    let read = path(part);
    let known = known.iter().find(|(path, _)| *path == read);
    let value = literal(part).or_else(|| match known?.1 {
        Value::IntIfThere(value) => Some(Value::Int(value)),
        value => Some(value),
    });
    value.map_or(Operand::Unknown, Operand::Value)
}

/// Returns the value of a string or a number.
fn literal(part: &[String]) -> Option<Value<'_>> {
    let [token] = part else { return None };
    match token.strip_prefix('"') {
        Some(text) => text.strip_suffix('"').map(Value::Text),
        None => token.parse().ok().map(Value::Int),
    }
}

/// Returns the text that reads a value, with `.name` for a last `["name"]`.
fn path(part: &[String]) -> String {
    match part {
        [map @ .., before, open, name, close] if before == "]" && open == "[" && close == "]" => {
            let name = name.trim_matches('"');
            format!("{}{before}.{name}", map.concat())
        }
        _ => part.concat(),
    }
}

/// Returns whether the device has a value.
fn present(read: &str, known: &Known<'_>) -> Truth {
    match known.iter().find(|(path, _)| path == read) {
        None | Some((_, Value::IntIfThere(_))) => Truth::Unknown,
        Some(_) => Truth::True,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: &str = r#"device.attributes["gpu.divvy.dev"].memoryEnforcement"#;
    const LIMIT: &str = r#"device.attributes["gpu.divvy.dev"].memoryLimitMaxPercent"#;

    /// Evaluates an expression in which λ stands for the level, and μ for the limit.
    fn said(expression: &str) -> Truth {
        let known = [
            (LEVEL.to_owned(), Value::Text("none")),
            (LIMIT.to_owned(), Value::Int(0)),
            ("device.driver".to_owned(), Value::Text("gpu.divvy.dev")),
        ];
        let text = expression.replace('λ', LEVEL).replace('μ', LIMIT);
        let value = tokens(&text).map_or(Truth::Unknown, |tokens| truth(&tokens, &known, DEPTH));
        assert_eq!(
            can_hold(&text, &known),
            value != Truth::False,
            "{expression}"
        );
        value
    }

    #[test]
    fn known_values_are_compared_and_all_else_is_possible() {
        use Truth::{False, True, Unknown};
        for (expression, value) in [
            (r#"λ == "cgroup""#, False),
            (r#""cgroup"==λ"#, False),
            ("λ == 'none'", True),
            (r#"λ != "none""#, False),
            (r#"λ != "cgroup""#, True),
            (r#"λ in ["cgroup", 'hardware']"#, False),
            (r#"λ in ["cgroup", "none"]"#, True),
            (r#"λ in ["cgroup", other]"#, Unknown),
            ("λ in []", Unknown),
            ("μ >= 100", False),
            ("μ >= 0", True),
            ("μ > 0", False),
            ("μ > -1", Unknown),
            ("1 > μ", True),
            ("μ < 1", True),
            ("μ < 0", False),
            ("μ <= 0", True),
            ("1 <= μ", False),
            ("μ == 0", True),
            ("μ != 0", False),
            ("μ in [100, 200]", False),
            ("μ in [0]", True),
            ("λ == 0", False),
            ("λ < 0", Unknown),
            ("μ == 100 || true", Unknown),
            ("has(μ)", True),
            ("has(λ)", True),
            ("has(device.attributes)", Unknown),
            ("size(λ)", Unknown),
            ("has[λ]", Unknown),
            ("has(λ]", Unknown),
            ("has[λ)", Unknown),
            ("[λ == 'cgroup']", Unknown),
            ("(λ == 'cgroup']", Unknown),
            ("[λ == 'cgroup')", Unknown),
            (
                r#""memoryLimitMaxPercent" in device.attributes["gpu.divvy.dev"]"#,
                True,
            ),
            (
                r#""memoryEnforcement" in device.attributes["gpu.divvy.dev"]"#,
                True,
            ),
            (r#""other" in device.attributes["gpu.divvy.dev"]"#, Unknown),
            (
                r#"device.attributes["gpu.divvy.dev"]["memoryEnforcement"] == "cgroup""#,
                False,
            ),
            (
                "device.attributes['gpu.divvy.dev'].memoryEnforcement == 'cgroup'",
                False,
            ),
            (
                r#"device.attributes["other"].memoryEnforcement == "cgroup""#,
                Unknown,
            ),
            (
                r#"device.driver != "gpu.divvy.dev" || λ == "cgroup""#,
                False,
            ),
            // λogic, with and without parts that are not known.
            (r#"λ == "cgroup" && device.x > 3"#, False),
            (r#"device.x > 3 && λ == "cgroup""#, False),
            (r#"λ == "none" && device.x > 3"#, Unknown),
            (r#"λ == "cgroup" || device.x > 3"#, Unknown),
            (r#"λ == "none" || device.x > 3"#, True),
            (r#"λ == "cgroup" || λ == "hardware""#, False),
            (r#"λ == "none" || λ == "a" && λ == "b""#, True),
            (r#"(λ == "none" || λ == "a") && λ == "b""#, False),
            (r#"!(λ == "cgroup")"#, True),
            (r#"!((λ == "none"))"#, False),
            ("!has(μ)", False),
            ("!device.x", Unknown),
            (r#"!λ == "cgroup""#, Unknown),
            (r#"device.x == (λ == "cgroup")"#, Unknown),
            (r#"(λ) == "cgroup""#, Unknown),
        ] {
            assert_eq!(said(expression), value, "{expression}");
        }
    }

    #[test]
    fn other_syntax_is_possible_and_hides_nothing_beside_it() {
        use Truth::{False, Unknown};
        for (expression, value) in [
            (r#"device.x ? λ == "cgroup" : false"#, Unknown),
            (r#"["a"].exists(l, l == λ)"#, Unknown),
            (r#"λ.startsWith("c")"#, Unknown),
            (r#"λ == """cgroup""""#, Unknown),
            (r#"λ == "cgro\u0075p""#, Unknown),
            (r#"λ == "cgroup" // "a" || true"#, False),
            ("λ == // 'none'\n 'cgroup'", False),
            // Strings that are not compared do not hide what is beside them.
            (r#"x.matches("^\\d\"") && λ == "cgroup""#, False),
            (r#"x.matches('"\'||') && λ == "cgroup""#, False),
            (r#"x.matches(r"\") && λ == "cgroup""#, False),
            (r#"x == """a"||""" && λ == "cgroup""#, False),
            (r#"x == '''a'||''' && λ == "cgroup""#, False),
            (r#"x == "http://" && λ == "cgroup""#, False),
            (r#"x == "" && λ == "cgroup""#, False),
            (r#"x.?y.orValue("") == "a" && λ == "cgroup""#, False),
            (r#"x[?"y"].orValue("") == "a" && λ == "cgroup""#, False),
            (r#"x.?y == z ? true : λ == "cgroup""#, Unknown),
            (r#"λ == "cgroup\"#, Unknown),
            (r#"λ == r"cgroup""#, Unknown),
            (r#"λ == "cgroup"#, Unknown),
            ("", Unknown),
            ("!", Unknown),
            ("&&", Unknown),
            ("λ == é", Unknown),
        ] {
            assert_eq!(said(expression), value, "{expression}");
        }
    }

    #[test]
    fn an_expression_that_is_nested_too_deep_is_possible() {
        let nested =
            |depth: usize| format!("{}λ == \"cgroup\"{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(said(&nested(DEPTH - 1)), Truth::False);
        assert_eq!(said(&nested(DEPTH)), Truth::Unknown);
        assert_eq!(said(&nested(5000)), Truth::Unknown);
        assert_eq!(said(&"!".repeat(10_000)), Truth::Unknown);
    }
}

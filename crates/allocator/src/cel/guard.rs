//! A look at an expression before it is parsed: would it nest so deeply that parsing overflows the stack?
//!
//! Kubernetes limits the recursion of its parser to 250 and answers an error; the parser here limits only what is
//! in parentheses. A chain of operators nests as deeply as it is long, so long chains are refused by counting.

/// The limit of Kubernetes' parser.
pub(super) const MAX_DEPTH: usize = 250;

/// How many brackets may be open at once: what the parser itself allows for parentheses.
const MAX_OPEN: usize = 96;

/// Open brackets that the parser has room for on any thread: a level costs it up to 50 KiB of stack.
const SHALLOW: usize = 12;

/// Stack for an expression with more.
const DEEP_STACK: usize = 32 << 20;

/// How an expression can be parsed and evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    /// On the caller's stack.
    Shallow,
    /// Only with more stack than a thread has by default.
    Deep,
    /// Not at all.
    TooDeep,
}

/// Parses or evaluates with a stack that is large enough for [`Depth::Deep`]; `None` when there is no thread to be had.
pub(super) fn with_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(DEEP_STACK).spawn_scoped(scope, work);
        thread.ok()?.join().ok()
    })
}

/// How deeply an expression nests.
///
/// `&&`, `||` and commas end a chain: their operands are trees of their own, and the parser balances the former.
pub(super) fn depth(expression: &str) -> Depth {
    let (mut rest, mut longest) = (expression, 0_usize);
    let (mut chain, mut conditionals, mut open, mut most_open) = (0_usize, 0_usize, 0_usize, 0_usize);
    let mut previous = ' ';
    while let Some(c) = rest.chars().next() {
        let after = rest.get(c.len_utf8()..).unwrap_or_default();
        rest = match c {
            '"' | '\'' => after_string(rest, c, matches!(previous, 'r' | 'R')),
            '/' if after.starts_with('/') => {
                after.find('\n').and_then(|end| after.get(end..)).unwrap_or_default()
            }
            '&' | '|' | ',' => {
                chain = 0;
                after
            }
            '?' if !matches!(previous, '.' | '[') => {
                conditionals += 1;
                after
            }
            '+' | '-' | '*' | '/' | '%' | '<' | '>' | '=' | '!' | '.' | '[' | '(' | '{' => {
                chain += 1;
                after
            }
            _ => after,
        };
        match c {
            '[' | '(' | '{' => open += 1,
            ']' | ')' | '}' => open = open.saturating_sub(1),
            _ => {}
        }
        if chain > MAX_DEPTH || open > MAX_OPEN || conditionals > MAX_DEPTH {
            return Depth::TooDeep;
        }
        most_open = most_open.max(open);
        longest = longest.max(chain).max(conditionals);
        previous = c;
    }
    // A chain of operators costs less than brackets, but not nothing.
    if most_open + longest / 8 > SHALLOW { Depth::Deep } else { Depth::Shallow }
}

/// What follows the string literal that begins here.
fn after_string(text: &str, quote: char, raw: bool) -> &str {
    let triple: String = [quote; 3].iter().collect();
    let single = &triple.get(..1).unwrap_or_default();
    let end = if text.starts_with(&triple) { triple.as_str() } else { single };
    let mut rest = text.get(end.len()..).unwrap_or_default();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix(end) {
            return after;
        }
        let mut chars = rest.chars();
        if chars.next() == Some('\\') && !raw {
            chars.next();
        }
        rest = chars.as_str();
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_count_and_what_is_in_strings_and_comments_does_not() {
        let chain = |term: &str| term.repeat(MAX_DEPTH + 1);
        for deep in [
            chain("+1"),
            chain(".a"),
            chain("!"),
            chain("["),
            chain("a?b:"),
            format!("// \"\n{}", chain("+1")),
            format!(r"r'\'{}", chain("+1")),
            format!(r#""\""{}"#, chain("+1")),
            format!("'''a'b'''{}", chain("+1")),
            chain("[1, "),
            chain("f(a && "),
        ] {
            assert_eq!(depth(&deep), Depth::TooDeep, "{deep}");
        }
        for fine in [
            chain("a.b == 1 && "),
            chain("x ||"),
            format!("\"{}\"", chain("+")),
            format!("'''{}'''", chain("'+")),
            format!("true // {}", chain("+")),
            chain("f(1), "),
            "has(device.attributes[\"a\"].b) && [1, 2].exists(x, (x + 1) * 2 > 3)".to_owned(),
        ] {
            assert_eq!(depth(&fine), Depth::Shallow, "{fine}");
        }
        assert_eq!(depth(&format!("{}1{}", "(".repeat(40), ")".repeat(40))), Depth::Deep);
    }
}

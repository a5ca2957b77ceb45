//! Commands of fenced and indented blocks: what of a document is typed into a shell.

/// Begin of a line of a block without a fence.
const INDENT: &str = "    ";

/// A line to type, with what it continues on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Place in the document, from 1.
    pub(crate) number: usize,
    /// Text without its comment, with single spaces.
    pub(crate) text: String,
}

/// Returns the lines of all blocks of `sh`, `bash`, `shell` and `console` (of those only what
/// follows a prompt), and of the blocks that are indented by four spaces.
pub(crate) fn lines(document: &str) -> Vec<Line> {
    let mut found = Vec::new();
    let mut after_a_gap = true;
    let mut rest = document.lines().enumerate().peekable();
    while let Some((start, line)) = rest.next() {
        if let Some(typed) = line.strip_prefix(INDENT).filter(|_| after_a_gap) {
            let mut block = typed.to_owned();
            while let Some((_, more)) = rest.next_if(|(_, line)| line.starts_with(INDENT)) {
                block.push('\n');
                block.push_str(more.trim_start_matches(INDENT));
            }
            found.extend(split(&block, start + 1));
            continue;
        }
        after_a_gap = line.trim().is_empty();
        let Some(language) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let inside: Vec<&str> = rest
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| !line.trim_start().starts_with("```"))
            .collect();
        // The first line of the block is the one after the fence.
        let first = start + 2;
        match language {
            "sh" | "bash" | "shell" => found.extend(split(&inside.join("\n"), first)),
            "console" => {
                for (index, line) in inside.iter().enumerate() {
                    let typed = line.strip_prefix("$ ").unwrap_or_default();
                    found.extend(split(typed, first + index));
                }
            }
            _ => {}
        }
    }
    found
}

/// Splits a script at its line ends, but for those inside of quotes, brackets and continuations.
fn split(script: &str, first: usize) -> Vec<Line> {
    let mut found = Vec::new();
    let (mut text, mut number, mut began) = (String::new(), first, first);
    let (mut quote, mut depth, mut comment) = (None, 0_u32, false);
    let mut all = script.chars().peekable();
    while let Some(c) = all.next() {
        if c == '\n' {
            number += 1;
            comment = false;
            if quote.is_none() && depth == 0 {
                found.push(Line {
                    number: began,
                    text: std::mem::take(&mut text),
                });
                began = number;
            } else {
                text.push(' ');
            }
            continue;
        }
        match (c, quote) {
            _ if comment => continue,
            ('\\', None) if all.peek() == Some(&'\n') => {
                all.next();
                number += 1;
                text.push(' ');
                continue;
            }
            ('#', None) if text.is_empty() || text.ends_with(' ') => {
                comment = true;
                continue;
            }
            ('\'' | '"', None) => quote = Some(c),
            (_, Some(open)) if open == c => quote = None,
            ('(', None) if text.ends_with('$') => depth += 1,
            (')', None) => depth = depth.saturating_sub(1),
            _ => {}
        }
        text.push(c);
    }
    found.push(Line {
        number: began,
        text,
    });
    found
        .into_iter()
        .map(|line| Line {
            text: single_spaces(&line.text),
            ..line
        })
        .filter(|line| !line.text.is_empty())
        .collect()
}

fn single_spaces(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the simple commands of a line as words, those inside of `$(…)` first.
pub(crate) fn commands(line: &str) -> Vec<Vec<String>> {
    let (mut all, mut words, mut word) = (Vec::new(), Vec::new(), String::new());
    let mut quote = None;
    let mut rest = line;
    while let Some(c) = rest.chars().next() {
        rest = rest.get(c.len_utf8()..).unwrap_or_default();
        match (c, quote) {
            ('$', None | Some('"')) if rest.starts_with('(') => {
                let (inner, after) = rest.split_once(')').unwrap_or((rest, ""));
                all.extend(commands(inner.trim_start_matches('(')));
                word.push_str("SUBSTITUTED");
                rest = after;
            }
            ('\'' | '"', None) => quote = Some(c),
            (_, Some(open)) if open == c => quote = None,
            (' ', None) => words.extend(next(&mut word)),
            ('|' | '&' | ';', None) => {
                words.extend(next(&mut word));
                all.extend(next(&mut words));
            }
            _ => word.push(c),
        }
    }
    words.extend(next(&mut word));
    all.extend(next(&mut words));
    all
}

/// Takes what has been collected, if that is anything.
fn next<T: Default + PartialEq>(collected: &mut T) -> Option<T> {
    let taken = std::mem::take(collected);
    (taken != T::default()).then_some(taken)
}

#[test]
fn lines_are_found_without_comments_and_with_what_continues_them() {
    let document = "a\n```sh\n# first\nkubectl get x   # why\n\nhelm a \\\n  --set b\nk --patch '{\"a\":\n  #b}'\n```\n\
        ```yaml\nkind: Pod\n```\n1. x\n   ```console\n   $ no\n$ divvy a\nprinted\n   ```\n\
        * a\n    text\n\n    cargo a # why\n    sed b \\\n      -c\nend\n";
    let line = |number, text: &str| Line {
        number,
        text: text.to_owned(),
    };
    assert_eq!(
        lines(document),
        [
            line(4, "kubectl get x"),
            line(6, "helm a --set b"),
            line(8, "k --patch '{\"a\": #b}'"),
            line(17, "divvy a"),
            line(23, "cargo a"),
            line(24, "sed b -c"),
        ]
    );
}

#[test]
fn commands_are_words_and_those_that_are_substituted_come_first() {
    let of = |line: &str| {
        commands(line)
            .iter()
            .map(|words| words.join("|"))
            .collect::<Vec<_>>()
    };
    assert_eq!(of("a 'b c' && d | e"), ["a|b c", "d", "e"]);
    assert_eq!(of("a $(b -l c=d) --x"), ["b|-l|c=d", "a|SUBSTITUTED|--x"]);
    assert_eq!(of(r#"a "$(b)""#), ["b", "a|SUBSTITUTED"]);
}

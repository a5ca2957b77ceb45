//! The words that texts of this repository avoid, in files of every kind: documents, messages,
//! comments and names. The words to use instead are in `docs/glossary.md`.

use std::path::Path;

use anyhow::Result;

/// Words that are refused.
struct Banned {
    /// Each is one word, or several that follow one another, in lower case.
    words: &'static [&'static str],
    /// Why a reader stumbles over them.
    reason: &'static str,
    /// Replacement.
    instead: &'static str,
}

const BANNED: &[Banned] = &[
    Banned {
        words: &["tell", "tells", "told", "telling", "teller"],
        reason: "a program does not talk; the reader has to guess how it passes on what",
        instead: "report, notify, log, show, list, write an Event",
    },
    Banned {
        words: &[
            "somebody",
            "someone",
            "whoever",
            "whomever",
            "nobody",
            "anybody",
            "everybody",
        ],
        reason: "the reader has to work out who is meant",
        instead: "the noun: a claim, a process, an administrator, the plugin, another call; or a passive",
    },
    Banned {
        words: &["he", "him", "his"],
        reason: "a thread, a claim or a process is not a person, and of a person the gender is unknown",
        instead: "it, its; or they",
    },
    Banned {
        words: &[
            "no reason to",
            "no proof",
            "as good as",
            "none of its business",
        ],
        reason: "an understatement by negation has to be decoded",
        instead: "what happens: a failed write does not prevent publishing",
    },
];

/// Files that contain such words for a reason: path (or its beginning, if it ends in `/`), reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("LICENSE", "the text of the licence"),
    (
        "proto/protos/",
        "Kubernetes' own definitions, with its comments",
    ),
    ("xtask/src/words.rs", "this list"),
];

const KINDS: &[&str] = &[
    "rs", "md", "yaml", "yml", "json", "txt", "tpl", "toml", "sh", "proto", "py", "c", "h",
];

/// Adds the findings in the files of the tree.
pub(crate) fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let names = crate::sources::files(root, "*")?;
    for name in names.iter().filter(|name| is_text(name)) {
        if EXCEPTIONS.iter().any(|(path, _)| is_in(name, path)) {
            continue;
        }
        let Ok(text) = fs_err::read_to_string(root.join(name)) else {
            continue;
        };
        let found = find(&text);
        findings.extend(found.iter().map(|(line, word, banned)| {
            format!(
                "{name}:{line}: {word:?}: {}; write {}",
                banned.reason, banned.instead
            )
        }));
    }
    Ok(())
}

fn is_text(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|e| e.to_str());
    extension.is_none_or(|extension| KINDS.contains(&extension))
}

fn is_in(name: &str, path: &str) -> bool {
    if path.ends_with('/') {
        name.starts_with(path)
    } else {
        name == path
    }
}

/// Returns line, word and entry of each banned word. Names count too: `snake_case` is three words,
/// and so is `CamelCase` two.
fn find(text: &str) -> Vec<(usize, &'static str, &'static Banned)> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words = words(line);
        for banned in BANNED {
            for phrase in banned.words {
                let phrase_words: Vec<&str> = phrase.split(' ').collect();
                if words
                    .windows(phrase_words.len())
                    .any(|window| window == phrase_words)
                {
                    found.push((number + 1, *phrase, banned));
                }
            }
        }
    }
    found
}

/// Returns the words of a line in lower case. A letter behind an apostrophe belongs to the word
/// before.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut last = ' ';
    for c in line.chars() {
        let begins = c.is_uppercase() && last.is_lowercase();
        if !c.is_alphabetic() || begins {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_alphabetic()) {
            word.extend(c.to_lowercase());
        }
        last = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, &'static str)> {
        find(text)
            .into_iter()
            .map(|(line, word, _)| (line, word))
            .collect()
    }

    #[test]
    fn banned_words_are_found_in_sentences_and_in_names() {
        assert_eq!(
            found("a\nNobody's claim is TOLD.\n"),
            [(2, "told"), (2, "nobody")]
        );
        assert_eq!(
            found("fn what_is_told() -> EventTeller"),
            [(1, "told"), (1, "teller")]
        );
        assert_eq!(
            found("a full disk is no reason to stop"),
            [(1, "no reason to")]
        );
    }

    #[test]
    fn words_inside_of_others_are_not_found() {
        assert_eq!(
            found("intelligent, stellar, retold, the, this, heterogeneous, with a reason to stop"),
            []
        );
    }

    #[test]
    fn exceptions_name_a_file_or_a_folder() {
        assert!(is_in("proto/protos/a.proto", "proto/protos/") && is_in("LICENSE", "LICENSE"));
        assert!(!is_in("LICENSE.md", "LICENSE") && !is_in("proto/src/lib.rs", "proto/protos/"));
    }
}

//! JSON no deeper than its parser follows it. Anyone who may create a claim can nest its parameters
//! a thousand levels deep, and one object that cannot be parsed would keep all others of a list
//! from their readers.

use http::{Response, header};
use http_body_util::BodyExt as _;
use http_body_util::combinators::MapFrame;
use hyper::body::{Body, Bytes, Frame};

/// Levels that are passed on; the parser follows 128.
const DEEPEST: u32 = 100;

/// Returns an answer of the API server whose JSON is no deeper than [`DEEPEST`].
pub fn shallow<B: Body<Data = Bytes>>(
    answer: Response<B>,
) -> Response<MapFrame<B, impl FnMut(Frame<Bytes>) -> Frame<Bytes> + Send + 'static>> {
    let media = answer.headers().get(header::CONTENT_TYPE);
    let is_json = media.is_some_and(|media| media.as_bytes().starts_with(b"application/json"));
    let mut filter = Shallow::default();
    let mut pass = move |piece: Bytes| match filter.pass(&piece) {
        Some(kept) if is_json => Bytes::from(kept),
        _ => piece,
    };
    answer.map(|body| body.map_frame(move |frame| frame.map_data(&mut pass)))
}

/// A filter of JSON documents that come in pieces: what is nested deeper becomes `null`.
#[derive(Debug, Default)]
struct Shallow {
    /// Objects and lists that are open.
    depth: u32,
    in_text: bool,
    /// True behind a backslash in a text.
    is_escaped: bool,
}

impl Shallow {
    /// Returns the next piece without what is nested too deep; `None` if it stays as it is.
    fn pass(&mut self, piece: &[u8]) -> Option<Vec<u8>> {
        let mut kept: Option<Vec<u8>> = None;
        for (at, byte) in piece.iter().enumerate() {
            let was_deep = self.depth > DEEPEST;
            self.read(*byte);
            let is_deep = self.depth > DEEPEST;
            match &mut kept {
                None if !was_deep && !is_deep => continue,
                None => kept = Some(piece.iter().take(at).copied().collect()),
                Some(_) => {}
            }
            let kept = kept.get_or_insert_default();
            match (was_deep, is_deep) {
                (false, false) => kept.push(*byte),
                (false, true) => kept.extend(b"null"),
                (true, _) => {}
            }
        }
        kept
    }

    fn read(&mut self, byte: u8) {
        if self.in_text {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => self.in_text = false,
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => self.in_text = true,
            b'{' | b'[' => self.depth = self.depth.saturating_add(1),
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes a text in pieces of a size.
    fn passed(text: &str, size: usize) -> String {
        let mut filter = Shallow::default();
        let pieces = text.as_bytes().chunks(size);
        let all = pieces.flat_map(|piece| filter.pass(piece).unwrap_or_else(|| piece.to_vec()));
        String::from_utf8(all.collect()).unwrap()
    }

    #[test]
    fn what_is_nested_too_deep_is_null_however_it_comes() {
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        let at_most = usize::try_from(DEEPEST).unwrap();
        let cut = "[".repeat(at_most) + "null" + &"]".repeat(at_most);
        let objects = r#"{"a":"#.repeat(900) + r#""}]\"""# + &"}".repeat(900);
        for (text, expected) in [
            (deep(at_most), deep(at_most)),
            (deep(at_most + 1), cut.clone()),
            (deep(5000), cut.clone()),
            // Documents of a watch follow each other.
            (
                format!("{}\n{}\n{{}}", deep(200), deep(3)),
                format!("{cut}\n[[[]]]\n{{}}"),
            ),
            (
                r#"{"text":"[[{\"[\\","b":[1]}"#.to_owned(),
                r#"{"text":"[[{\"[\\","b":[1]}"#.to_owned(),
            ),
        ] {
            for size in [1, 2, 7, 4096] {
                assert_eq!(passed(&text, size), expected, "{size}");
            }
        }
        let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok();
        assert!(!parsed(&objects) && parsed(&passed(&objects, 3)));
    }

    #[test]
    fn what_is_not_deep_is_not_copied() {
        assert_eq!(Shallow::default().pass(br#"{"a":[{"b":"c"}]}"#), None);
    }
}

//! Report of a conversion: a line for each thing that has no counterpart.

use std::fmt;

use serde::Serialize;

use crate::format::one_line;

/// A line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Note {
    pub(crate) level: Level,
    /// Kind, namespace and name; empty for what is about the whole input.
    object: String,
    /// Path of the field; empty for what is about the whole object.
    field: String,
    text: String,
}

/// Weight of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Level {
    /// Something is other than before.
    Note,
    /// Something is left as it was, and has no effect, or not the same, with divvy.
    NotConverted,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.level {
            Level::Note => "note: ",
            Level::NotConverted => "not converted: ",
        })?;
        // What users wrote is in one line, so that it cannot look like another note.
        for place in [&self.object, &self.field] {
            if !place.is_empty() {
                write!(f, "{}: ", one_line(place))?;
            }
        }
        f.write_str(&one_line(&self.text))
    }
}

impl Note {
    /// Returns the text without its place.
    pub(super) fn reason(&self) -> &str {
        &self.text
    }

    /// Returns the path of the field.
    pub(super) fn field(&self) -> &str {
        &self.field
    }

    /// Makes a note about the whole input.
    pub(super) fn general(text: &str) -> Self {
        Self {
            level: Level::Note,
            object: String::new(),
            field: String::new(),
            text: text.to_owned(),
        }
    }
}

/// Report of one object.
#[derive(Debug, Default)]
pub(super) struct Notes {
    object: String,
    all: Vec<Note>,
    /// True once something was refused: what it belongs to stays as it is.
    refused: bool,
}

impl Notes {
    pub(super) fn of(object: String) -> Self {
        Self {
            object,
            ..Self::default()
        }
    }

    fn add(&mut self, level: Level, field: &str, text: String) {
        let note = Note {
            level,
            object: self.object.clone(),
            field: field.to_owned(),
            text,
        };
        if !self.all.contains(&note) {
            self.all.push(note);
        }
    }

    /// Notes that a field has no counterpart, or not quite.
    pub(super) fn note(&mut self, field: &str, text: impl Into<String>) {
        self.add(Level::Note, field, text.into());
    }

    /// Notes that a field stays as it was, while what is beside it is converted.
    pub(super) fn unknown(&mut self, field: &str, text: impl Into<String>) {
        self.add(Level::NotConverted, field, text.into());
    }

    /// Notes that a field cannot be converted, and so the whole that it belongs to.
    pub(super) fn refuse(&mut self, field: &str, text: impl Into<String>) {
        self.add(Level::NotConverted, field, text.into());
        self.refused = true;
    }

    /// Runs a conversion whose paths are those of another place.
    pub(super) fn at<T>(
        &mut self,
        place: impl Fn(&str) -> String,
        convert: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let before = std::mem::take(&mut self.all);
        let converted = convert(self);
        let new = std::mem::replace(&mut self.all, before);
        for note in new {
            let field = place(&note.field);
            self.add(note.level, &field, note.text);
        }
        converted
    }

    /// Runs a conversion of a copy. If something in it was refused, the copy is of no use and
    /// neither are the notes about it, but for those that say why.
    pub(super) fn attempt<T>(&mut self, convert: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let before = std::mem::take(&mut self.all);
        let outer = std::mem::replace(&mut self.refused, false);
        let converted = convert(self);
        let refused = std::mem::replace(&mut self.refused, outer);
        let new = std::mem::replace(&mut self.all, before);
        for note in new {
            if (!refused || note.level == Level::NotConverted) && !self.all.contains(&note) {
                self.all.push(note);
            }
        }
        (!refused).then_some(converted)
    }

    pub(super) fn into_all(self) -> Vec<Note> {
        self.all
    }
}

/// Returns the path of a field below another one.
pub(super) fn under(path: &str, field: &str) -> String {
    if path.is_empty() {
        field.to_owned()
    } else {
        format!("{path}.{field}")
    }
}

//! The memory slices of a GPU as a picture in the terminal: what is where, what is free.

use divvy_model::mig::{GpuInstance, MigCapabilities};
use serde::Serialize;

use crate::format::shortened;

/// The partitions that live on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Picture {
    /// The GPU, as its device is named.
    pub gpu: String,
    /// Number of its memory slices.
    pub slices: u32,
    /// The existing partitions, by start.
    pub partitions: Vec<Part>,
}

/// An existing partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
    /// Profile, such as `1g.10gb`.
    pub profile: String,
    /// Holder, if it is known: the first, where the partition is shared.
    pub holder: Option<String>,
    /// The further holders of a partition that is given out in shares.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<String>,
    /// Mark of a partition that is given out in time-sliced shares.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

/// Characters of the whole row.
const WIDTH: u32 = 72;

impl Picture {
    /// The instances that live on a GPU; `holders` knows whose they are, and if they have shares.
    pub fn of(
        gpu: String,
        capabilities: &MigCapabilities,
        instances: &[GpuInstance],
        holders: impl Fn(&GpuInstance) -> (Vec<String>, bool),
    ) -> Self {
        let profile = |instance: &GpuInstance| {
            let name = capabilities
                .profile(instance.profile)
                .and_then(|profile| capabilities.name(profile));
            name.map_or_else(
                || format!("profile {}", instance.profile.0),
                |name| name.to_string(),
            )
        };
        let mut partitions: Vec<Part> = instances
            .iter()
            .map(|instance| {
                let (holders, shared) = holders(instance);
                let mut holders = holders.into_iter();
                Part {
                    start: instance.placement.start,
                    size: instance.placement.size,
                    profile: profile(instance),
                    holder: holders.next(),
                    more: holders.collect(),
                    shared,
                }
            })
            .collect();
        partitions.sort_by_key(|part| part.start);
        Self {
            gpu,
            slices: capabilities.memory_slices(),
            partitions,
        }
    }

    /// The picture: a row of boxes, the numbers of the slices below, and whose each box is. Lines
    /// without an indent.
    pub fn lines(&self) -> Vec<String> {
        let width = (WIDTH / self.slices.max(1)).max(3) as usize;
        let (mut cells, mut legend) = (Vec::new(), Vec::new());
        let mut slice = 0;
        while slice < self.slices {
            let part = self
                .partitions
                .iter()
                .find(|part| part.start == slice && part.size > 0);
            let (size, text) = match part {
                Some(part) => {
                    let key = letter(legend.len());
                    let holder = part.holder.as_deref().unwrap_or("(no claim)");
                    let how = if part.shared { " shared by" } else { "" };
                    let head = format!("{key}  {}{how}  ", part.profile);
                    let rest = part
                        .more
                        .iter()
                        .map(|more| format!("{:width$}{more}", "", width = head.chars().count()));
                    legend.push(
                        std::iter::once(format!("{head}{holder}"))
                            .chain(rest)
                            .collect::<Vec<_>>(),
                    );
                    (part.size, format!("{key} {}", part.profile))
                }
                None => (1, "free".to_owned()),
            };
            cells.push((text, width * size as usize - 1));
            slice += size;
        }
        let numbers: Vec<String> = (0..self.slices)
            .map(|n| format!("{:<width$}", format!(" {n}")))
            .collect();
        let blank = " ".repeat(self.gpu.chars().count().max(6));
        let mut lines = boxes(&self.gpu, &cells);
        lines.push(
            format!("{blank} {}", numbers.concat())
                .trim_end()
                .to_owned(),
        );
        let legend = legend.into_iter().flatten();
        lines.extend(legend.map(|line| format!("{blank}  {line}")));
        lines
    }
}

/// Returns the letter of a holder in a picture.
pub fn letter(number: usize) -> char {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    LETTERS
        .get(number % LETTERS.len())
        .copied()
        .map_or('?', char::from)
}

/// A row of boxes, each with its text and width, behind the name of a GPU.
pub fn boxes(gpu: &str, cells: &[(String, usize)]) -> Vec<String> {
    let lines: Vec<String> = cells.iter().map(|(_, width)| "─".repeat(*width)).collect();
    let texts: Vec<String> = cells
        .iter()
        .map(|(text, width)| format!("{:<width$}", shortened(text, *width)))
        .collect();
    vec![
        format!("{:<6} ┌{}┐", "", lines.join("┬")),
        format!("{gpu:<6} │{}│", texts.join("│")),
        format!("{:<6} └{}┘", "", lines.join("┴")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_as_wide_as_their_slices_and_the_rest_is_free() {
        let part = |start, size, profile: &str, holder: Option<&str>| Part {
            start,
            size,
            profile: profile.to_owned(),
            holder: holder.map(str::to_owned),
            more: Vec::new(),
            shared: false,
        };
        let partitions = vec![
            part(0, 1, "1g.10gb", Some("default/a")),
            part(2, 2, "2g.20gb", None),
            part(4, 4, "3g.40gb", Some("default/c")),
        ];
        let picture = Picture {
            gpu: "gpu-0".to_owned(),
            slices: 8,
            partitions,
        };
        let expected = [
            "       ┌────────┬────────┬─────────────────┬───────────────────────────────────┐",
            "gpu-0  │A 1g.10…│free    │B 2g.20gb        │C 3g.40gb                          │",
            "       └────────┴────────┴─────────────────┴───────────────────────────────────┘",
            "        0        1        2        3        4        5        6        7",
            "        A  1g.10gb  default/a",
            "        B  2g.20gb  (no claim)",
            "        C  3g.40gb  default/c",
        ];
        assert_eq!(picture.lines(), expected);
        let mut shared = picture.partitions[0].clone();
        (shared.more, shared.shared) = (vec!["default/b".to_owned()], true);
        let shared = Picture {
            partitions: vec![shared],
            ..picture
        };
        let expected = [
            "        A  1g.10gb shared by  default/a",
            "                              default/b",
        ];
        assert_eq!(shared.lines()[4..], expected);
    }

    #[test]
    fn a_grid_of_twelve_fits_too() {
        let picture = Picture {
            gpu: "gpu-10".to_owned(),
            slices: 12,
            partitions: Vec::new(),
        };
        let lines = picture.lines();
        assert_eq!((lines.len(), lines[1].matches("free").count()), (4, 12));
        assert_eq!(lines[0].chars().count(), lines[1].chars().count());
    }
}

//! Plain tables: a header, a rule, rows; columns as wide as their widest cell. No borders, so that
//! they can be cut and searched with the usual tools.

/// A table that is filled row by row.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self {
            rows: vec![header.map(str::to_owned).to_vec()],
        }
    }

    /// Adds columns, before any row.
    pub fn widen(&mut self, header: &[&str]) {
        let names = header.iter().map(|name| (*name).to_owned());
        self.rows
            .iter_mut()
            .for_each(|row| row.extend(names.clone()));
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.cells(cells.into());
    }

    /// Adds a row that may be shorter than the others.
    pub fn cells(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text, each line indented.
    pub fn render(&self, indent: usize) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &[String]| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            format!(
                "{}{}",
                " ".repeat(indent),
                cells.collect::<Vec<_>>().join("  ")
            )
            .trim_end()
            .to_owned()
        };
        let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        let mut lines = Vec::new();
        for (number, row) in self.rows.iter().enumerate() {
            lines.push(line(row));
            if number == 0 {
                lines.push(line(&rule));
            }
        }
        lines.join("\n")
    }
}

/// A cell; `-` where there is nothing.
pub fn or_dash(text: &str) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["A", "LONG"]);
        table.row(["xyz".to_owned(), "1".to_owned()]);
        assert_eq!(table.render(2), "  A    LONG\n  ───  ────\n  xyz  1");
    }
}

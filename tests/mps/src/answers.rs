//! The default limits of a daemon of protocol v2, as NVIDIA's programs take and show them.

/// A daemon knows so many GPUs.
pub(crate) const DEVICES: usize = 32;

/// Limits of servers that are started from now on.
pub(crate) struct Limits {
    pub(crate) percent: f64,
    /// In bytes; 0 is none.
    pub(crate) memory: [u64; DEVICES],
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            percent: 100.0,
            memory: [0; DEVICES],
        }
    }
}

impl Limits {
    /// Sets the part of the threads. The answer is what is set then; the error, which only the log
    /// has, too.
    pub(crate) fn set_percent(&mut self, text: &str) -> Result<(), String> {
        let percent = leading(text).parse::<f64>().unwrap_or(0.0);
        if percent > 0.0 && percent <= 100.0 {
            self.percent = percent;
            return Ok(());
        }
        Err("Invalid percentage, expected between (0.0, 100.0]".to_owned())
    }

    /// Sets the memory of a device. By another name than a number it takes that of the first.
    pub(crate) fn set_memory(&mut self, device: &str, amount: &str) -> Result<(), String> {
        let number = device.parse::<usize>();
        let bytes = if number.is_ok() { bytes(amount) } else { 0 };
        let place = self.memory.get_mut(number.unwrap_or(0));
        *place.ok_or("Invalid device ordinal!")? = bytes;
        Ok(())
    }

    /// Returns the memory of a device, rounded down, from 1 GiB on to whole ones.
    pub(crate) fn memory(&self, device: &str) -> Result<String, String> {
        let bytes = self.memory.get(device.parse().unwrap_or(0));
        match *bytes.ok_or("Invalid device ordinal!")? {
            0 => Err("No default pinned memory limit set for the device!".to_owned()),
            bytes if bytes >= 1 << 30 => Ok(format!("{}G", bytes >> 30)),
            bytes => Ok(format!("{}M", bytes >> 20)),
        }
    }
}

/// Reads an amount as C does: the number at the beginning, and the letter after it. Another letter
/// than G is taken for M.
fn bytes(amount: &str) -> u64 {
    let digits = amount.len()
        - amount
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .len();
    let (number, unit) = amount.split_at(digits);
    let shift = match unit.chars().next() {
        Some('G' | 'g') => 30,
        _ => 20,
    };
    number.parse::<u64>().unwrap_or(0) << shift
}

/// Returns the number at the beginning of a text.
fn leading(text: &str) -> &str {
    let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == '-';
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    text.split_at(end).0
}

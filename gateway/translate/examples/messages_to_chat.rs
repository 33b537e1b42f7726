//! Translates Messages bodies, one a line, to chat completions, one a line.

use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};

fn main() -> Result<(), Box<dyn Error>> {
    for line in stdin().lock().lines() {
        let chat = moongate_translate::messages_to_chat(line?.as_bytes())?;
        stdout().write_all(&[chat, b"\n".to_vec()].concat())?;
    }
    Ok(())
}
